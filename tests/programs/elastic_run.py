"""An elastic training run of agents on this machine, one device each, that may be killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
JOB = '''
"""The digits with small towers, trained by plain SGD: runs can be compared to the last bits.

Before some steps the data waits for a file: what happens meanwhile does not depend on speed.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

import torch

from graphpipe.zoo.digits import digits

GATES = {int(k): Path(v) for k, v in (g.split("=") for g in os.environ.get("GATES", "").split())}


def job():
    made = digits(width=16, heads=2, image_layers=1, text_layers=1)

    def data(batch_size, epoch):
        every = list(made.data(batch_size, epoch))
        for number, batch in enumerate(every):
            gate = GATES.get(epoch * len(every) + number + 1)
            while gate is not None and not gate.exists():
                time.sleep(0.05)
            yield batch

    return replace(
        made,
        data=data,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.005, momentum=0.9),
        batch_size=64,
    )
'''


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ElasticRun:
    """Agents and the store that they meet at; ends them all when it is closed.

    Args:
        folder: For job, checkpoints, log and outputs.
        steps: Optimizer steps.
        save_every: Steps between checkpoints.
        most: Largest number of nodes.
        prefix: By node, what comes before its command (``ip netns exec ...``).
        addresses: By node, its address.
        interface: Network interface of every node.
        timeout: Seconds after which a rank that does not answer is lost.
        gates: Steps that are not taken before :meth:`open_gate`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        save_every: int,
        most: int,
        prefix: Callable[[int], Sequence[str]] = lambda node: (),
        addresses: Callable[[int], str] = lambda node: "127.0.0.1",
        interface: str = "lo",
        timeout: int = 120,
        gates: Sequence[int] = (),
    ) -> None:
        self.folder = folder
        self.log = folder / "log.jsonl"
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self._prefix, self._addresses = prefix, addresses
        self._interface, self._timeout = interface, timeout
        self._gates = {step: folder / f"gate{step}" for step in gates}
        self._steps, self._every, self._most = steps, save_every, most
        (folder / "job_for_elastic.py").write_text(JOB)
        self._port = free_port()
        self._started = 0
        self._store = self._start(
            0, [sys.executable, "-m", "graphpipe", "rendezvous", "--port", str(self._port)], "store"
        )

    def _start(self, node: int, command: Sequence[str], name: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.out").open("wb") as out:
            return subprocess.Popen(
                [*self._prefix(node), *command],
                cwd=ROOT,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                    "GATES": " ".join(f"{k}={v}" for k, v in self._gates.items()),
                    "GLOO_SOCKET_IFNAME": self._interface,
                },
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def start_agent(self, node: int) -> None:
        """A node comes (back)."""
        self._started += 1
        self.agents[node] = self._start(
            node,
            [
                sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{self._most}",
                "--nproc-per-node=1", "--max-restarts=100", "--monitor-interval=0.2",
                "--rdzv-backend=c10d", f"--rdzv-endpoint={self._addresses(0)}:{self._port}",
                "--rdzv-id=test", f"--local-addr={self._addresses(node)}",
                "--rdzv-conf=is_host=0,last_call_timeout=2,join_timeout=120,"
                "keep_alive_interval=1,keep_alive_max_attempt=4,read_timeout=20",
                "-m", "graphpipe", "train", f"{self.folder / 'job_for_elastic.py'}:job",
                "--elastic", f"--steps={self._steps}", f"--save={self.folder / 'checkpoints'}",
                f"--save-every={self._every}", "--keep=3", f"--history={self.log}",
                f"--timeout={self._timeout}",
            ],
            f"agent{node}.{self._started}",
        )  # fmt: skip

    def kill_agent(self, node: int) -> None:
        """A node is lost: agent and worker end at once, without a word."""
        agent = self.agents.pop(node)
        _kill_family(agent)

    def open_gate(self, step: int) -> None:
        """Lets the step be taken."""
        self._gates[step].touch()

    def lines(self) -> list[dict[str, float]]:
        """The log so far: step, loss, workers; in the order of writing."""
        if not self.log.exists():
            return []
        text = self.log.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait_for(self, what: Callable[[list[dict[str, float]]], bool], seconds: float) -> None:
        """Waits until ``what`` is true of the log."""
        deadline = time.monotonic() + seconds
        while not what(self.lines()):
            assert time.monotonic() < deadline, self.outputs()
            assert any(agent.poll() is None for agent in self.agents.values()) or what(
                self.lines()
            ), self.outputs()
            time.sleep(0.05)

    def finish(self, seconds: float) -> list[int]:
        """Waits for all agents; their exit codes."""
        deadline = time.monotonic() + seconds
        codes = []
        for agent in self.agents.values():
            try:
                codes.append(agent.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise AssertionError(self.outputs()) from None
        return codes

    def outputs(self) -> str:
        """The ends of everything that was printed."""
        files = sorted(self.folder.glob("*.out"))
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-1500:]}" for f in files)

    def close(self) -> None:
        for process in (*self.agents.values(), self._store):
            _kill_family(process)


def _kill_family(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and everything that it started (workers have sessions of their own)."""
    import psutil

    family = []
    if process.poll() is None:
        try:
            parent = psutil.Process(process.pid)
            family = [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            pass
    for member in family:
        try:
            member.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.wait()
