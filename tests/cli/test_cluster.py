"""``graphpipe cluster ...``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from graphpipe import Cluster
from tests.cli.helpers import fail, run, run_json


def test_show_and_write(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    assert "v100-16gb" in run("cluster", "show", "2x2xv100-16gb", "-o", out).stdout
    found = Cluster.load(out)
    assert [device.node for device in found.devices] == [0, 0, 1, 1]


def test_devices() -> None:
    assert {"h100-sxm", "cpu-core"} <= {item["name"] for item in run_json("cluster", "devices")}


def test_probe_needs_ranks(tmp_path: Path) -> None:
    message = fail("cluster", "probe", "-o", tmp_path / "c.toml")
    assert "does not know its rank" in message
    assert "torchrun" in message


def test_probe_under_torchrun(tmp_path: Path) -> None:
    out = tmp_path / "cluster.toml"
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*start, "-m", "graphpipe", "cluster", "probe", "-o", str(out), "--name", "here"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 -> 1" in done.stdout
    found = Cluster.load(out)
    assert found.name == "here"
    assert found.world_size == 2
    assert found.network.intra_node_bandwidth is not None
