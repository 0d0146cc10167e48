"""From recipes to plans: valid, within memory, deterministic, run as published."""

from __future__ import annotations

from random import Random

import pytest

from graphpipe.errors import InfeasibleError
from graphpipe.plan.validate import validate
from graphpipe.planner.baselines.downsets import DownSetLimitError
from graphpipe.planner.baselines.recipe import SearchTimeoutError
from graphpipe.planner.baselines.registry import BASELINES
from graphpipe.planner.baselines.search import fused_for_baselines, plan_baseline
from graphpipe.planner.lower_bound import lower_bound
from tests.planner.synthetic import cluster_of, random_graph, towers, units_of


@pytest.mark.parametrize("name", sorted(BASELINES))
@pytest.mark.parametrize("devices", [1, 4, 5])
def test_every_baseline_gives_a_valid_plan(name: str, devices: int) -> None:
    file = towers(3, 3, 2)
    units = units_of(file)
    cluster = cluster_of(devices, bandwidth=1e10, latency=1e-5)
    found = plan_baseline(name, units, cluster, 16)
    validate(found.plan, file.graph)
    assert found.plan.planner == name
    assert found.plan.prediction is not None
    assert found.units == 11
    assert found.iteration_ns >= lower_bound(file.graph, file.costs, cluster, 16).nanoseconds
    assert found == plan_baseline(name, units, cluster, 16)._replace(
        search_seconds=found.search_seconds, longest_seconds=found.longest_seconds
    )


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_with_frozen_parts(seed: int) -> None:
    random = Random(seed)
    file = random_graph(random, random.randint(2, 7), frozen=True)
    units = units_of(file)
    for name in sorted(BASELINES):
        cluster = cluster_of(random.randint(1, 4), bandwidth=1e9)
        found = plan_baseline(name, units, cluster, random.choice([1, 3, 8]))
        validate(found.plan, file.graph)


def test_a_chain_runs_as_a_chain() -> None:
    """The stages of parallel branches wait for one another, as they would where published."""
    units = units_of(towers(4, 1, 1))
    found = plan_baseline("1f1b", units, cluster_of(5), 8)
    assert found.plan.prediction is not None
    # Chain of 5 stages of 1 + 2 ms, single samples: (8 + 4) x 3 ms; as a graph (8 + 1) x 3 ms.
    assert found.iteration_ns == 36_000_000
    assert found.plan.prediction.iteration_ns < 36_000_000
    assert [stage.in_flight for stage in found.plan.stages] == [5, 4, 3, 2, 1]


def test_graphpipe_runs_branches_side_by_side() -> None:
    units = units_of(towers(4, 1, 1))
    found = plan_baseline("graphpipe-paper", units, cluster_of(5, bandwidth=1e3), 8)
    assert found.iteration_ns >= 27_000_000
    assert len(found.plan.stages) == 5
    assert {stage.in_flight for stage in found.plan.stages} == {1, 2}


def test_a_small_memory_asks_for_small_micro_batches_and_then_is_too_small() -> None:
    units = units_of(towers(1, 4, 0))
    static = 4 * 4e6
    roomy = plan_baseline("1f1b", units, cluster_of(4, memory_bytes=1e12), 16)
    tight = plan_baseline("1f1b", units, cluster_of(4, memory_bytes=static + 6e6), 16)
    capacity = static + 6e6
    assert tight.plan.prediction is not None
    assert max(tight.plan.prediction.peak_memory) <= capacity
    assert tight.iteration_ns >= roomy.iteration_ns
    with pytest.raises(InfeasibleError, match="'1f1b'"):
        plan_baseline("1f1b", units, cluster_of(4, memory_bytes=static), 16)


def test_nodes_are_levels_for_pipedream() -> None:
    units = units_of(towers(2, 3, 2))
    cluster = cluster_of(8, per_node=4, bandwidth=1e11, across=1e9)
    found = plan_baseline("pipedream", units, cluster, 16)
    assert sum(stage.replicas for stage in found.plan.stages) == 8


def test_limits_are_reported_by_kind() -> None:
    units = units_of(towers(5, 8, 1))
    with pytest.raises(DownSetLimitError):
        plan_baseline("piper", units, cluster_of(4), 8)
    fused = fused_for_baselines(units, cluster_of(4), 1, 300)
    assert len(fused) < len(units)
    with pytest.raises(SearchTimeoutError):
        plan_baseline("piper", fused, cluster_of(4), 8, time_limit=0.0)
    assert plan_baseline("piper", fused, cluster_of(4), 8).units == len(fused)
