"""The explanation names the bottleneck, and its figures are the plan's."""

from __future__ import annotations

from graphpipe.planner.explain import explain
from graphpipe.planner.search import plan
from tests.planner.synthetic import cluster_of, towers


def test_an_explanation_tells_why() -> None:
    file = towers(3, 4, 2)
    cluster = cluster_of(4, per_node=2, bandwidth=1e9)
    found = plan(file.graph, file.costs, cluster, batch_size=32, budget=200)
    assert found.prediction is not None
    text = explain(found, file.graph, file.costs)
    assert f"Iteration {found.prediction.iteration_ns / 1e6:.4g} ms" in text
    for word in (
        "Bottleneck: device",
        "Bubble",
        "Memory: device",
        "No plan can take less",
        "above",
    ):
        assert word in text
    assert "No plan can take less" in explain(found)


def test_idle_devices_are_stated() -> None:
    file = towers(1, 1, 0)
    found = plan(file.graph, file.costs, cluster_of(3), batch_size=1)
    assert found.idle_devices
    assert "idle" in explain(found)
