"""Piper's dynamic programme against brute force and its published input."""

from __future__ import annotations

import math
from itertools import product
from random import Random

import numpy as np
import pytest

from graphpipe.errors import CostError, InfeasibleError
from graphpipe.planner.baselines.downsets import DownSetLimitError
from graphpipe.planner.baselines.piper import (
    Configurations,
    PiperInput,
    PiperResult,
    configurations_from_arrays,
    optimise,
)
from tests.planner.baselines.published import piper_profile
from tests.planner.baselines.random_dags import chains_of_stages, random_edges

_GIB = 2.0**30


def _random_input(random: Random, nodes: int, degrees: tuple[int, ...]) -> PiperInput:
    edges = random_edges(random, nodes)
    table = {}
    for t in degrees:
        plain = np.array([random.uniform(0.1, 1.0) for _ in range(nodes)]) / t**0.8
        slower = plain * random.uniform(1.1, 1.5)
        saved = np.array([random.uniform(0.1, 1.0) for _ in range(nodes)])
        static = np.array([random.uniform(0.1, 0.5) for _ in range(nodes)])
        extra = np.array([random.uniform(0, 0.2) if t > 1 else 0.0 for _ in edges])
        weights = static / 2
        seconds = np.stack([plain, slower], axis=1)
        if t > 1 and random.random() < 0.5:
            seconds[random.randrange(nodes)] = np.nan
        table[t] = Configurations(
            seconds=seconds,
            parameter_bytes=np.stack([weights, weights], axis=1),
            memory_a=np.stack([saved, saved / 4], axis=1),
            memory_b=np.stack([static, static + saved / 2], axis=1),
            extra_in=extra,
            extra_out=extra / 2,
        )
    return PiperInput(
        nodes=nodes,
        edges=edges,
        edge_bytes=np.array([random.uniform(0, 0.3) for _ in edges]),
        configurations=table,
        memory_bytes=random.choice([100.0, 4.0, 2.5]),
        bandwidth=3.0,
        micro_batches=random.choice([1, 2, 4, 6, 12]),
    )


def _stage_seconds(
    problem: PiperInput, stage: frozenset[int], t: int, d: int, y: int
) -> tuple[float, tuple[int, ...]]:
    """Seconds of a stage by the rules of the paper, and each node's configuration."""
    costs = problem.configurations[t]
    nodes = sorted(stage)
    if np.isnan(costs.seconds[nodes]).any():
        return math.inf, ()
    cut = 0.0
    for k, (a, b) in enumerate(problem.edges):
        if b in stage and a not in stage:
            cut += 2 * (problem.edge_bytes[k] + costs.extra_in[k])
        if a in stage and b not in stage:
            cut += 2 * (problem.edge_bytes[k] + costs.extra_out[k])

    def load(node: int, c: int) -> float:
        reduce = 4 * (d - 1) * costs.parameter_bytes[node, c] / d / problem.micro_batches
        return float(costs.seconds[node, c] / d + reduce / problem.bandwidth)

    def memory(node: int, c: int) -> float:
        return float(costs.memory_a[node, c] * y + costs.memory_b[node, c])

    chosen = dict.fromkeys(nodes, 0)
    excess = sum(memory(node, 0) for node in nodes) - problem.memory_bytes
    prices = sorted(
        ((load(node, 1) - load(node, 0)) / (memory(node, 0) - memory(node, 1)), node)
        for node in nodes
        if memory(node, 0) - memory(node, 1) > 1e-9
    )
    for _, node in prices:
        if excess <= 0:
            break
        excess -= memory(node, 0) - memory(node, 1)
        chosen[node] = 1
    if excess > 1e-9:
        return math.inf, ()
    seconds = cut / d / problem.bandwidth + sum(load(node, chosen[node]) for node in nodes)
    return seconds, tuple(chosen[node] for node in nodes)


def _brute_force(problem: PiperInput, devices: int) -> float:
    best = math.inf
    bound = min(devices, problem.micro_batches)
    ways = [
        (t, d)
        for t in problem.configurations
        for d in range(1, bound + 1)
        if problem.micro_batches % d == 0 and t * d <= devices
    ]
    for stages in chains_of_stages(problem.nodes, problem.edges):
        for choice in product(ways, repeat=len(stages)):
            replicas = sum(d for _, d in choice)
            if sum(t * d for t, d in choice) > devices or replicas > bound:
                continue
            slowest = 0.0
            for stage, (t, d) in zip(stages, choice, strict=True):
                y = math.ceil(replicas / d)
                slowest = max(slowest, _stage_seconds(problem, stage, t, d, y)[0])
                replicas -= d
            best = min(best, slowest)
    return best


def _check_result(problem: PiperInput, result: PiperResult, devices: int) -> None:
    """The stages divide the nodes, and the rules give the same objective for them."""
    assert sorted(n for s in result.stages for n in s.nodes) == list(range(problem.nodes))
    assert sum(s.replicas * s.tensor_parallel for s in result.stages) <= devices
    replicas = sum(s.replicas for s in result.stages)
    slowest = 0.0
    for stage in result.stages:
        y = math.ceil(replicas / stage.replicas)
        replicas -= stage.replicas
        seconds, chosen = _stage_seconds(
            problem, frozenset(stage.nodes), stage.tensor_parallel, stage.replicas, y
        )
        assert chosen == stage.configuration
        slowest = max(slowest, seconds)
    assert slowest == pytest.approx(result.seconds, rel=1e-9)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("degrees", [(1,), (1, 2)])
def test_the_optimum_of_small_graphs(seed: int, degrees: tuple[int, ...]) -> None:
    random = Random(seed)
    nodes, devices = random.randint(2, 5), random.randint(1, 4)
    problem = _random_input(random, nodes, degrees)
    expected = _brute_force(problem, devices)
    if math.isinf(expected):
        with pytest.raises(InfeasibleError, match="memory"):
            optimise(problem, devices)
        return
    result = optimise(problem, devices)
    assert result.seconds == pytest.approx(expected, rel=1e-9)
    _check_result(problem, result, devices)


def test_the_published_bert_gives_the_original_objective() -> None:
    problem = piper_profile("bert32a100.json", memory_bytes=16 * _GIB, bandwidth=25 * _GIB)
    result = optimise(problem, 4)
    assert result.seconds == pytest.approx(0.29441, abs=5e-6)
    _check_result(problem, result, 4)


def test_more_down_sets_than_the_limit_are_refused() -> None:
    problem = _random_input(Random(0), 5, (1,))
    with pytest.raises(DownSetLimitError):
        optimise(problem, 2, limit=3)


def test_cut_edges_that_differ_between_configurations_are_refused() -> None:
    one = np.ones((2, 2))
    with pytest.raises(CostError, match="differ"):
        configurations_from_arrays(
            one, one, one, one, [np.zeros(1), np.ones(1)], [np.zeros(1), np.zeros(1)]
        )
