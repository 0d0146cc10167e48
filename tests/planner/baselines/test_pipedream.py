"""PipeDream's optimiser against brute force, its paper's example figures and its profiles."""

from __future__ import annotations

import math
from itertools import product
from random import Random

import numpy as np
import pytest

from graphpipe.errors import InfeasibleError
from graphpipe.planner.baselines.downsets import DownSetLimitError
from graphpipe.planner.baselines.pipedream import Level, NodeCosts, optimise
from tests.planner.baselines.published import pipedream_profile
from tests.planner.baselines.random_dags import Edges, chains_of_stages, random_edges, splits


def _random_costs(random: Random, nodes: int) -> NodeCosts:
    def draw(high: float) -> np.ndarray:
        return np.array([random.uniform(0.0, high) for _ in range(nodes)])

    return NodeCosts(draw(1.0), draw(1.0), draw(1.0))


def _brute_force(
    costs: NodeCosts, edges: Edges, machines: int, bandwidth: float, memory: float | None
) -> float:
    best = math.inf
    for stages in chains_of_stages(len(costs.seconds), edges):
        for replicas in splits(machines, len(stages)):
            slowest, fits = 0.0, True
            for position, (stage, m) in enumerate(zip(stages, replicas, strict=True)):
                nodes = sorted(stage)
                parameters = costs.parameter_bytes[nodes].sum()
                reduce = 4 * (m - 1) * parameters / (m * bandwidth)
                slowest = max(slowest, (costs.seconds[nodes].sum() + reduce) / m)
                kept = parameters + costs.activation_bytes[nodes].sum()
                after = sum(replicas[position + 1 :])
                fits &= memory is None or math.ceil(after / m) * kept <= memory
            if fits:
                best = min(best, slowest)
    return best


@pytest.mark.parametrize("seed", range(30))
def test_the_optimum_of_small_graphs(seed: int) -> None:
    random = Random(seed)
    nodes, machines = random.randint(2, 6), random.randint(1, 5)
    edges = random_edges(random, nodes)
    costs = _random_costs(random, nodes)
    memory = random.choice([None, 1.0, 3.0])
    expected = _brute_force(costs, edges, machines, 4.0, memory)
    if math.isinf(expected):
        with pytest.raises(InfeasibleError):
            optimise(costs, edges, [Level(machines, 4.0)], memory_bytes=memory)
        return
    result = optimise(costs, edges, [Level(machines, 4.0)], memory_bytes=memory)
    assert result.seconds == pytest.approx(expected, rel=1e-12)
    assert sorted(n for stage in result.stages for n in stage.nodes) == list(range(nodes))
    assert sum(stage.replicas for stage in result.stages) == machines
    position = {n: i for i, stage in enumerate(result.stages) for n in stage.nodes}
    assert all(position[a] <= position[b] for a, b in edges)


@pytest.mark.parametrize("seed", range(10))
def test_two_levels_split_each_range_at_its_best(seed: int) -> None:
    """On a chain: all outer splits, each inner range solved by the one-level optimiser."""
    random = Random(seed)
    nodes, inner, outer = 5, random.randint(2, 3), random.randint(2, 3)
    chain = tuple((i, i + 1) for i in range(nodes - 1))
    costs = _random_costs(random, nodes)
    best = math.inf
    for cuts in product([False, True], repeat=nodes - 1):
        bounds = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), nodes]
        for groups in splits(outer, len(bounds) - 1):
            slowest = 0.0
            for start, stop, m in zip(bounds, bounds[1:], groups, strict=False):
                part = NodeCosts(
                    costs.seconds[start:stop],
                    costs.parameter_bytes[start:stop],
                    costs.activation_bytes[start:stop],
                )
                edges = tuple((i, i + 1) for i in range(stop - start - 1))
                work = optimise(part, edges, [Level(inner, 8.0)]).seconds
                reduce = 4 * (m - 1) * part.parameter_bytes.sum() / (m * 2.0)
                # The authors' program lets the level below share only the first stage's.
                slowest = max(slowest, (work + reduce / (inner if start == 0 else 1)) / m)
            best = min(best, slowest)
    result = optimise(costs, chain, [Level(inner, 8.0), Level(outer, 2.0)])
    assert result.seconds == pytest.approx(best, rel=1e-12)
    assert sum(stage.replicas for stage in result.stages) == inner * outer


def test_a_straight_pipeline_has_no_replicas() -> None:
    costs = NodeCosts(np.ones(4), np.zeros(4), np.zeros(4))
    result = optimise(costs, [(0, 1), (1, 2), (2, 3)], [Level(2, 1.0)], straight=True)
    assert [stage.replicas for stage in result.stages] == [1, 1]
    assert result.seconds == 2.0


def test_reducing_once_per_mini_batch_makes_replication_cheap() -> None:
    costs = NodeCosts(np.array([1.0]), np.array([10.0]), np.zeros(1))
    often = optimise(costs, [], [Level(2, 10.0)])
    seldom = optimise(costs, [], [Level(2, 10.0)], synchronise_every=100.0)
    assert often.seconds == pytest.approx((1 + 2.0) / 2)
    assert seldom.seconds == pytest.approx((1 + 0.02) / 2)


def test_several_levels_refuse_a_graph_with_too_many_states() -> None:
    costs = NodeCosts(np.ones(14), np.ones(14), np.ones(14))
    with pytest.raises(DownSetLimitError, match="machine levels"):
        optimise(costs, [], [Level(4, 1.0), Level(2, 1.0)])


def test_the_published_vgg16_profile_gives_the_original_objective() -> None:
    profile = pipedream_profile("vgg16.txt")
    result = optimise(profile.costs, profile.edges, [Level(4, 1e9)])
    assert result.seconds == pytest.approx(0.17573, abs=5e-6)
    assert [(len(s.nodes), s.replicas) for s in result.stages] == [(15, 3), (25, 1)]


@pytest.mark.parametrize("levels", [[Level(32, 1e9)], [Level(4, 1e10), Level(2, 1e9)]])
def test_the_published_resnet50_profile(levels: list[Level]) -> None:
    """The objective can be recomputed from the stages (two levels: a bound, see below)."""
    profile = pipedream_profile("resnet50.txt")
    result = optimise(profile.costs, profile.edges, levels)
    total = math.prod(level.machines for level in levels)
    assert sum(stage.replicas for stage in result.stages) == total
    slowest = 0.0
    for stage in result.stages:
        nodes, m = list(stage.nodes), stage.replicas
        parameters = profile.costs.parameter_bytes[nodes].sum()
        reduce = 4 * (m - 1) * parameters / (m * levels[0].bandwidth)
        slowest = max(slowest, (profile.costs.seconds[nodes].sum() + reduce) / m)
    if len(levels) == 1:
        assert result.seconds == pytest.approx(slowest, rel=1e-9)
    else:
        # The inner bandwidth alone is faster than the two together.
        assert slowest <= result.seconds * (1 + 1e-9)
    assert result.seconds >= profile.costs.seconds.sum() / total
