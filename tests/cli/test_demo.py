"""``graphpipe demo``, with one short epoch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from graphpipe import Plan, Timeline


def test_everything_is_shown_and_written(tmp_path: Path) -> None:
    words = ["demo", "--epochs", "1", "--batch-size", "256", "--out", str(tmp_path), "-w", "2"]
    # A process of its own, since rank 0 writes to the standard output that it inherits.
    done = subprocess.run(
        [sys.executable, "-m", "graphpipe", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for said in (
        "Plan for digits",
        "One iteration, predicted:",
        "The same 5 steps of SGD in fp32 by this pipeline and by one process",
        "zero-shot accuracy",
        "One iteration, measured:",
        "of the held-out digits",
    ):
        assert said in done.stdout, said
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.batch_size == 256
    assert Timeline.load(tmp_path / "measured.json").world_size == 2
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert any("measured" in name for name in names)
    assert any("predicted" in name for name in names)
