"""Whether splitting pays is found out by planning both graphs."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphpipe.cost.analytic import estimate
from graphpipe.cost.cluster import Cluster, Device
from graphpipe.cost.profiler.profile import profile
from graphpipe.errors import CostError
from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.graph.split_joins import split_joins
from graphpipe.plan.plan import Plan
from graphpipe.plan.validate import validate
from graphpipe.planner.search import plan
from tests.graph.joined import Joined, captured

CLUSTER = Cluster.uniform("v100-16gb", nodes=1, per_node=4)


class Wide(nn.Module):
    """Four branches, the first linear after them the largest op."""

    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.join = nn.Linear(4 * width, width, bias=False)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([branch(x).relu() for branch in self.branches], 1)
        out: torch.Tensor = self.head(self.join(joined).relu())
        return out.squeeze(1)


@cache
def wide() -> ModelGraph:
    with torch.device("meta"):
        model = Wide()
        x, y = torch.zeros(2, 4096), torch.zeros(2)
    return capture(model, (x,), targets=y, loss_fn=functional.mse_loss)


def nanoseconds(found: Plan) -> int:
    assert found.prediction is not None
    return found.prediction.iteration_ns


def test_a_join_that_bounds_the_pipeline_is_split() -> None:
    costs = estimate(wide(), CLUSTER, optimizer="sgd")
    options = {"batch_size": 2048, "budget": 40, "replicas": False, "copies": 1}
    whole = plan(wide(), costs, CLUSTER, **options)  # type: ignore[arg-type]
    found = plan(wide(), costs, CLUSTER, split_joins=True, **options)  # type: ignore[arg-type]
    assert found.split_joins == split_joins(wide()).joins
    assert nanoseconds(found) < 0.9 * nanoseconds(whole)
    assert any(note.startswith("Joins split: join.weight.") for note in found.notes)
    validate(found, split_joins(wide()))
    again = plan(wide(), costs, CLUSTER, split_joins=True, **options)  # type: ignore[arg-type]
    assert again == found


def test_a_join_that_does_not_is_left_whole() -> None:
    graph = captured(Joined().float())
    costs = estimate(graph, CLUSTER)
    options = {"batch_size": 64, "budget": 60}
    whole = plan(graph, costs, CLUSTER, **options)  # type: ignore[arg-type]
    found = plan(graph, costs, CLUSTER, split_joins=True, **options)  # type: ignore[arg-type]
    assert nanoseconds(found) <= nanoseconds(whole)
    if not found.split_joins:
        assert any(note.startswith("No join was split: the best plan") for note in found.notes)


def test_a_graph_without_joins_gets_a_plan_and_a_note() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    graph = captured(model)
    costs = estimate(graph, CLUSTER)
    found = plan(graph, costs, CLUSTER, batch_size=64, budget=20, split_joins=True)
    assert not found.split_joins
    assert any("No join was split" in note and "no join to split" in note for note in found.notes)


def test_measured_costs_are_needed_of_both_graphs() -> None:
    graph = captured(Joined().float())
    costs = profile(graph, "cpu", micro_batches=[2, 4])
    kind = next(iter(costs.devices))
    cluster = Cluster(devices=tuple(Device(kind=kind, memory_bytes=2**33) for _ in range(2)))
    with pytest.raises(CostError, match="do not say what the parts of a split linear take"):
        plan(graph, costs, cluster, batch_size=8, budget=20, split_joins=True)
    other = profile(split_joins(graph), "cpu", micro_batches=[2, 4])
    found = plan(graph, costs, cluster, batch_size=8, budget=20, split_joins=other)
    assert found.prediction is not None
    with pytest.raises(CostError, match="belong to another graph"):
        plan(graph, costs, cluster, batch_size=8, budget=20, split_joins=costs)


def test_a_graph_that_is_split_already_is_refused() -> None:
    split = split_joins(captured(Joined().float()))
    costs = estimate(split, CLUSTER)
    with pytest.raises(CostError, match="split already"):
        plan(split, costs, CLUSTER, batch_size=64, budget=20, split_joins=True)
