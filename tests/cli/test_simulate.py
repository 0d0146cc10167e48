"""``graphpipe simulate``."""

from __future__ import annotations

import json
from pathlib import Path

from graphpipe import Plan, Timeline
from tests.cli.helpers import Files, fail, run, run_json


def test_timeline_and_companions(files: Files, tmp_path: Path) -> None:
    timeline, trace, dot = tmp_path / "t.json", tmp_path / "trace.json", tmp_path / "p.dot"
    result = run("simulate", files.plan, "-o", timeline, "--trace", trace, "--dot", dot)
    assert "rank 0 |" in result.stdout
    assert "rank 1 |" in result.stdout
    found = Timeline.load(timeline)
    prediction = Plan.load(files.plan).prediction
    assert prediction is not None
    assert found.iteration_ns == prediction.iteration_ns
    assert json.loads(trace.read_text())["traceEvents"]
    assert dot.read_text().startswith("digraph")


def test_network_models(files: Files) -> None:
    for network in ("channel", "shared"):
        assert run_json("simulate", files.plan, "--network", network)["network"] == network


def test_file_of_another_kind(files: Files) -> None:
    assert "graphpipe-plan" in fail("simulate", files.graph)
