"""Demands of a user, each held by the plan that comes back."""

from __future__ import annotations

import pytest

from graphpipe.cost.cluster import Cluster, Device, Network
from graphpipe.cost.published.build import KIND
from graphpipe.plan.plan import Plan
from graphpipe.plan.stage import Stage
from graphpipe.plan.validate import validate
from graphpipe.planner.constraints import Constraints
from graphpipe.planner.search import plan
from tests.planner.synthetic import cluster_of, towers


def stages_of(found: Plan) -> dict[str, Stage]:
    return {op: stage for stage in found.stages for op in stage.ops}


def planned(demands: Constraints) -> tuple[Plan, dict[str, Stage]]:
    file = towers(3, 4, 2)
    found = plan(
        file.graph, file.costs, cluster_of(4, bandwidth=1e9), batch_size=16,
        constraints=demands, budget=150,
    )  # fmt: skip
    validate(found, file.graph)
    return found, stages_of(found)


def test_together() -> None:
    _, of = planned(Constraints(together=[["b0.0", "b0.3"]]))
    assert of["b0.0"] is of["b0.1"] is of["b0.2"] is of["b0.3"]


def test_no_cut_between_neighbours() -> None:
    _, of = planned(Constraints(no_cut=[("b1.1", "b1.2"), ("t.0", "t.1")]))
    assert of["b1.1"] is of["b1.2"]
    assert of["t.0"] is of["t.1"]


def test_pin() -> None:
    found, of = planned(Constraints(pin={"b0.1": 2, "t.1": 0}))
    assert of["b0.1"].devices[0] == 2
    assert of["t.1"].devices[0] == 0
    assert found.copies == 1


def test_micro_batch() -> None:
    _, of = planned(Constraints(micro_batch={"b2.0": 2, "t.1": 8}))
    assert of["b2.0"].micro_batch == 2
    assert of["t.1"].micro_batch == 8


def test_everything_at_once() -> None:
    demands = Constraints(
        together=[["b0.0", "b0.2"]],
        pin={"b1.3": 1},
        micro_batch={"t.1": 4},
        no_cut=[("b2.0", "b2.1")],
    )
    _, of = planned(demands)
    assert of["b0.0"] is of["b0.2"]
    assert of["b1.3"].devices[0] == 1
    assert of["t.1"].micro_batch == 4
    assert of["b2.0"] is of["b2.1"]


@pytest.mark.parametrize("batch", [8])
def test_demands_do_not_make_a_plan_better(batch: int) -> None:
    """The plans that a demand allows are among those without it."""
    file = towers(2, 4, 2)
    cluster = cluster_of(4, bandwidth=1e9)
    blocks = [[f"b{i}.0", f"b{i}.3"] for i in range(2)]
    free = plan(file.graph, file.costs, cluster, batch_size=batch)
    bound = plan(
        file.graph, file.costs, cluster, batch_size=batch, constraints=Constraints(together=blocks)
    )
    assert free.prediction is not None
    assert bound.prediction is not None
    assert free.prediction.iteration_ns <= 1.001 * bound.prediction.iteration_ns


def test_a_slow_network_between_nodes_keeps_replicas_inside() -> None:
    """Eight devices in two nodes: over a slow link nothing heavy travels in the steady state."""
    file = towers(2, 4, 2)
    times = []
    for across in (1e10, 1e7):
        cluster = cluster_of(8, per_node=4, bandwidth=1e10, across=across)
        found = plan(file.graph, file.costs, cluster, batch_size=32, budget=200)
        validate(found, file.graph)
        assert found.prediction is not None
        times.append(found.prediction.iteration_ns)
    assert times[0] <= times[1]
    one_node = plan(
        file.graph, file.costs, cluster_of(4, bandwidth=1e10), batch_size=32, budget=200
    )
    assert one_node.prediction is not None
    # Leaving the second node idle is always possible.
    assert times[1] <= 1.02 * one_node.prediction.iteration_ns


def test_idle_devices_are_stated() -> None:
    file = towers(1, 2, 0)
    cluster = Cluster(
        devices=tuple(Device(kind=KIND, memory_bytes=2**40, node=0) for _ in range(9)),
        network=Network(intra_node_bandwidth=1e9, inter_node_bandwidth=1e9),
    )
    found = plan(file.graph, file.costs, cluster, batch_size=1)
    validate(found, file.graph)
    used = {rank for stage in found.stages for rank in stage.devices}
    assert len(used) < 9
    assert "idle" in str(found).lower()
