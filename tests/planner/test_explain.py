"""The explanation names the bottleneck, and its figures are the plan's."""

from __future__ import annotations

from graphpipe.planner.explain import explain
from graphpipe.planner.lower_bound import lower_bound
from graphpipe.planner.search import plan
from graphpipe.units import format_ns
from tests.planner.synthetic import cluster_of, towers


def test_an_explanation_tells_why() -> None:
    file = towers(3, 4, 2)
    cluster = cluster_of(4, per_node=2, bandwidth=1e9)
    found = plan(file.graph, file.costs, cluster, batch_size=32, budget=200)
    assert found.prediction is not None
    text = explain(found, file.graph, file.costs)
    assert f"One iteration takes {format_ns(found.prediction.iteration_ns)} for 32" in text
    assert "The bottleneck is device" in text
    assert "of it between nodes; most of the time goes to" in text
    assert "Memory is tightest on device" in text
    bound = lower_bound(file.graph, file.costs, cluster, 32)
    assert f"can take less than {format_ns(bound.nanoseconds)} (" in text
    assert "Above the ideal work of a device" in text
    alone = explain(found)
    assert "can take less than" in alone
    assert "ideal work" not in alone


def test_idle_devices_are_stated() -> None:
    file = towers(1, 1, 0)
    found = plan(file.graph, file.costs, cluster_of(3), batch_size=1)
    assert found.idle_devices
    assert f"{len(found.idle_devices)} of 3 devices stay idle" in explain(found)
