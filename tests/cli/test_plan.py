"""``graphpipe plan``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphpipe import ModelGraph, Plan
from tests.cli.helpers import Files, fail, run, run_json

COSTS = {
    "nodes": [
        {"id": name, "fwd": 1.0, "bwd": 2.0, "param_bytes": 4, "act_bytes": 8, "out_bytes": 8}
        for name in "abcd"
    ],
    "edges": [["a", "b"], ["a", "c"], ["b", "d"], ["c", "d"]],
}


def test_plan_of_a_model(files: Files, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = run("plan", files.model, "--device", "cpu-core", "-n", 2, "-o", out)
    assert "Plan for branches" in result.stdout
    assert f"Wrote {out}." in result.stderr
    plan = Plan.load(out)
    assert (plan.batch_size, plan.world_size) == (8, 2)
    # The same as from the captured graph, which the fixture made.
    assert plan == Plan.load(files.plan)


def test_json(files: Files) -> None:
    found = run_json("plan", files.graph, "--cluster", "1x3xl4", "-b", 6)
    assert found["kind"] == "graphpipe-plan"
    assert len(found["cluster"]["devices"]) == 3


def test_plan_of_a_cost_graph(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS))
    found = run_json("plan", "--graph", path, "--devices", 2, "--batch-size", 8)
    assert found["batch_size"] == 8
    assert sorted(op for stage in found["stages"] for op in stage["ops"]) == list("abcd")


def test_the_batch_that_was_profiled_is_given_beside_a_profile(tmp_path: Path) -> None:
    line = "{0} -- op{0} -- forward_compute_time={1}, backward_compute_time=20.0, "
    line += "activation_size=1000, parameter_size=40"
    path = tmp_path / "graph.txt"
    path.write_text(f"{line.format(1, 10.0)}\n{line.format(2, 12.0)}\n\t1 -- 2\n")
    words = ("plan", "--graph", path, "--devices", 1, "--batch-size", 8)
    alone = run_json(*words)["prediction"]["iteration_ns"]
    of_four = run_json(*words, "--profiled-batch", 4)["prediction"]["iteration_ns"]
    # 62 ms for each sample, or for four of them.
    assert alone == pytest.approx(8 * 62e6)
    assert of_four == pytest.approx(2 * 62e6)


def test_demands(files: Files) -> None:
    words = ("--pin", "left=1", "--pin", "right=0", "--together", "left", "-m", "4")
    plan = run_json("plan", files.graph, "--device", "cpu-core", "-n", 2, "-b", 8, *words)
    graph = ModelGraph.load(files.graph)
    device = {}
    for stage in plan["stages"]:
        for op in stage["ops"]:
            device[graph.op_by_name[op].module.split(".")[0]] = stage["devices"]
        assert stage["micro_batch"] == 4
    assert (device["left"], device["right"]) == ([1], [0])
    kept = run_json("plan", files.graph, "--device", "cpu-core", "-n", 2, "-b", 8)
    again = run_json(
        *("plan", files.graph, "--device", "cpu-core", "-n", 2, "-b", 8, "--recompute", "on"),
        "--no-replicas",
    )
    assert not any(stage["recompute"] for stage in kept["stages"])
    assert any(stage["recompute"] for stage in again["stages"])
    assert {stage["replicas"] for stage in again["stages"]} == {1}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "expected a MODEL or --graph FILE, got neither"),
        (("zoo:digits", "--graph", "x.json", "-n", "2"), "got both"),
        (("MODEL",), "The devices to plan for are not named"),
        (("MODEL", "--device", "l5", "-n", "2"), "Unknown device"),
        (("MODEL", "--device", "l4", "-n", "9"), "do not fill whole nodes"),
        (("MODEL", "--device", "l4", "-n", "2", "--cluster", "2x2xl4"), "were both given"),
        (
            ("MODEL", "--device", "l4", "-n", "2", "--memory", "0.00000001"),
            "larger than any device",
        ),
        (("GRAPH", "--device", "l4", "-n", "2"), "Give --batch-size"),
        (("MODEL", "--device", "l4", "-n", "2", "--pin", "left"), "Not a name and a number"),
        (("MODEL", "--device", "l4", "-n", "2", "--pin", "lift=0"), "'lift'"),
        (("zoo:mmtt", "--device", "l4", "-n", "2"), "Did you mean zoo:mmt"),
        (("--graph", "nowhere.json", "-n", "2"), "nowhere.json"),
    ],
)
def test_wrong_use_is_told_in_one_paragraph(files: Files, words: list[str], said: str) -> None:
    named = {"MODEL": files.model, "GRAPH": str(files.graph)}
    message = fail("plan", *(named.get(word, word) for word in words))
    assert message.startswith("Error: ")
    assert said.lower() in message.lower()


def test_splitting_joins(files: Files, tmp_path: Path) -> None:
    words = ("--device", "cpu-core", "-n", 2, "-b", 8, "--split-joins")
    plan = run_json("plan", files.model, *words)
    assert any("join" in note.lower() and "split" in note for note in plan["notes"])
    graph = tmp_path / "split.json"
    run("capture", files.model, "--split-joins", "-o", graph)
    assert ModelGraph.load(graph).joins
    whole = tmp_path / "costs.json"
    split = tmp_path / "split_costs.json"
    for path, extra in ((whole, ()), (split, ("--split-joins",))):
        run("profile", files.model, "-o", path, "-m", "1,2", *extra)
    words = ("--device", "cpu-core", "-n", 2, "-b", 8, "--costs", whole)
    plan = run_json("plan", files.model, *words, "--split-costs", split)
    assert any("split" in note for note in plan["notes"])
    fail("plan", files.model, *words, "--split-joins")
