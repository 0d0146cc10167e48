"""Commands that turn files into words and other files: capture, explain, emulate, profile."""

from __future__ import annotations

from pathlib import Path

from graphpipe import CostTable, ModelGraph
from tests.cli.helpers import Files, fail, run, run_json


def test_capture(files: Files) -> None:
    result = run("capture", files.model)
    assert "branches: " in result.stdout
    assert "args[0] ['b', 6]" in result.stdout
    assert "(mean)" in result.stdout
    graph = ModelGraph.load(files.graph)
    assert run_json("capture", files.model)["ops"] == graph.model_dump(mode="json")["ops"]
    shown = run("capture", files.model, "--show").stdout
    assert all(op.name in shown for op in graph.ops)


def test_explain(files: Files) -> None:
    assert "The bottleneck is device" in run("explain", files.plan).stdout
    lines = run_json("explain", files.plan, "--graph", files.graph)["lines"]
    assert any("bound" in line or "least" in line or "less than" in line for line in lines)


def test_explain_with_another_graph(files: Files, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    run("capture", "zoo:candle-uno-tiny", "-o", other, "-q")
    assert "not the one that was planned" in fail("explain", files.plan, "--graph", other)


def test_emulate_equals_the_simulation(files: Files) -> None:
    assert "(+0 ns)" in run("emulate", files.plan).stdout


def test_profile_is_kept_and_used(files: Files, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    result = run("profile", files.model, "-o", costs, "-m", "2,4")
    assert "All operators of one micro-batch" in result.stdout
    table = CostTable.load(costs)
    assert table.micro_batches == (2, 4)
    written = costs.read_bytes()
    run("profile", files.model, "-o", costs, "-m", "2,4")
    assert costs.read_bytes() == written
    plan = run_json("plan", files.graph, "--costs", costs, "--device", "cpu-core", "-n", 2, "-b", 8)
    forward, _ = table.op_seconds("cpu-core", plan["stages"][0]["micro_batch"])
    times = [t["forward_ns"] for s in plan["stages"] for t in s["times"].values()]
    assert 0 < min(times) <= max(times) <= 2e9 * forward.sum()


def test_profile_with_nonsense(files: Files, tmp_path: Path) -> None:
    assert "Not a list of numbers" in fail(
        "profile", files.model, "-o", tmp_path / "c", "-m", "2,x"
    )
