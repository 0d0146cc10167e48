"""Two nodes with a network between them: slow, and cut off in the middle of training.

The nodes are network namespaces joined by a virtual link; only these are touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.programs.elastic_run import ElasticRun
from tests.programs.test_elastic import check_log

LINK = "gp0"


class Nodes:
    """The namespaces of two nodes, 10.77.0.1 and 10.77.0.2, joined by ``gp0`` in each."""

    def __init__(self) -> None:
        self.names = [f"gp-{os.getpid()}-{node}" for node in range(2)]

    def open(self) -> None:
        for name in self.names:
            run("ip", "netns", "add", name)
        one, other = self.names
        run("ip", "link", "add", LINK, "netns", one, "type", "veth", "peer", "name", LINK, "netns",
            other)  # fmt: skip
        for node, name in enumerate(self.names):
            self.on(node, "ip", "addr", "add", f"10.77.0.{node + 1}/24", "dev", LINK)
            self.on(node, "ip", "link", "set", LINK, "up")
            self.on(node, "ip", "link", "set", "lo", "up")
            assert name

    def on(self, node: int, *command: str) -> None:
        run("ip", "netns", "exec", self.names[node], *command)

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("network namespaces need root, and iproute2's ip and tc")
    made = Nodes()
    try:
        made.open()
    except OSError as error:
        made.close()
        pytest.skip(f"this machine does not allow network namespaces: {error}")
    yield made
    made.close()


def elastic(
    nodes: Nodes, folder: Path, *, steps: int, timeout: int, gates: Sequence[int] = ()
) -> ElasticRun:
    return ElasticRun(
        folder,
        steps=steps,
        save_every=5,
        most=2,
        prefix=lambda node: ("ip", "netns", "exec", nodes.names[node]),
        addresses=lambda node: f"10.77.0.{node + 1}",
        interface=LINK,
        timeout=timeout,
        gates=gates,
    )


def slow_down(nodes: Nodes) -> None:
    """Delay and low bandwidth where the kernel has netem, else low bandwidth alone."""
    netem = ("netem", "delay", "10ms", "rate", "8mbit")
    bucket = ("tbf", "rate", "8mbit", "burst", "16kbit", "latency", "400ms")
    for node in range(2):
        command = ("tc", "qdisc", "add", "dev", LINK, "root")
        try:
            nodes.on(node, *command, *netem)
        except OSError:
            try:
                nodes.on(node, *command, *bucket)
            except OSError as error:
                pytest.skip(f"this kernel cannot slow a link down: {error}")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_slow_link_changes_nothing_but_the_time(nodes: Nodes, tmp_path: Path) -> None:
    slow_down(nodes)
    training = elastic(nodes, tmp_path, steps=15, timeout=120)
    try:
        for node in range(2):
            training.start_agent(node)
        assert training.finish(300) == [0, 0]
        # Agents come one after the other: a short start alone is a disturbance too.
        check_log(training, 15, 5, disturbances=1)
        assert training.lines()[-1]["workers"] == 2
    finally:
        training.close()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_link_that_is_cut_leaves_one_node_that_goes_on(nodes: Nodes, tmp_path: Path) -> None:
    training = elastic(nodes, tmp_path, steps=40, timeout=10, gates=(14,))
    try:
        for node in range(2):
            training.start_agent(node)
        training.wait_for(
            lambda lines: bool(lines) and lines[-1]["workers"] == 2 and lines[-1]["step"] == 13, 240
        )
        nodes.on(0, "ip", "link", "set", LINK, "down")
        training.open_gate(14)
        training.wait_for(lambda lines: lines[-1]["step"] == 40, 240)
        assert training.agents[0].wait(120) == 0
        assert training.lines()[-1]["workers"] == 1
        check_log(training, 40, 5, disturbances=2)
    finally:
        training.close()
