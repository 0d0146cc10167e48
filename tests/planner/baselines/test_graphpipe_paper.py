"""GraphPipe as published: bottleneck, devices, memory."""

from __future__ import annotations

import math
from itertools import combinations
from random import Random

import numpy as np
import pytest

from graphpipe.cost.published.build import KIND, GraphFile
from graphpipe.errors import InfeasibleError
from graphpipe.planner.baselines.graphpipe_paper import PaperResult, optimise
from graphpipe.planner.baselines.inputs import pipedream_costs, unit_edges
from graphpipe.planner.baselines.pipedream import Level
from graphpipe.planner.baselines.pipedream import optimise as pipedream
from tests.planner.synthetic import towers, units_of

_PLENTY = 2.0**40


def _run(
    file: GraphFile,
    devices: int,
    *,
    memory: float = _PLENTY,
    micro_batch: int = 1,
    bandwidth: float | None = None,
) -> PaperResult:
    return optimise(
        units_of(file),
        KIND,
        devices,
        batch_size=64,
        largest_micro_batch=micro_batch,
        memory_bytes=memory,
        bandwidth=bandwidth,
    )


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 8])
def test_with_a_free_network_it_divides_the_work_evenly(devices: int) -> None:
    """Data parallelism reaches total / devices, and nothing can be below that."""
    file = towers(2, 3, 2)
    total = sum(file.costs.op_seconds(KIND, 1)[i].sum() for i in (0, 1))
    assert _run(file, devices).seconds_per_sample == pytest.approx(total / devices, rel=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_where_replicas_are_too_dear_a_chain_gets_its_best_cuts(seed: int) -> None:
    random = Random(seed)
    layers, devices = random.randint(3, 7), random.randint(2, 4)
    file = towers(1, layers, 0, forward_ms=random.uniform(0.5, 2.0))
    seconds = np.sum(file.costs.op_seconds(KIND, 1), axis=0)
    best = math.inf
    for parts in range(1, min(devices, layers) + 1):
        for cuts in combinations(range(1, layers), parts - 1):
            best = min(best, max(part.sum() for part in np.split(seconds, cuts)))
    result = _run(file, devices, bandwidth=1e3)
    assert result.seconds_per_sample == pytest.approx(best, rel=1e-5)
    assert all(stage.replicas == 1 for stage in result.stages)


def test_branches_become_stages_side_by_side() -> None:
    result = _run(towers(4, 2, 2), 5, bandwidth=1e3)
    assert sorted(len(stage.units) for stage in result.stages) == [2, 2, 2, 2, 2]
    branches = [stage.units for stage in result.stages if 8 not in stage.units]
    assert sorted(branches) == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_a_graph_keeps_less_in_flight_than_a_chain_of_as_many_stages() -> None:
    """Four branch stages and a trunk hold two micro-batches each in the branches: memory for
    three would be too much, and a chain of five stages would need five."""
    file = towers(4, 2, 2)
    static = 2 * 4e6 * 4
    fits = _run(file, 5, bandwidth=1e3, memory=static + 2 * 2e6)
    assert len(fits.stages) == 5
    with pytest.raises(InfeasibleError, match="memory"):
        _run(file, 5, bandwidth=1e3, memory=static + 1.9 * 2e6)


def test_it_is_never_behind_pipedream_with_the_same_objective() -> None:
    """Without a cost of replication both minimise the slowest stage; graphs contain chains."""
    file = towers(3, 2, 3)
    units = units_of(file)
    ours = _run(file, 4).seconds_per_sample
    theirs = pipedream(pipedream_costs(units, KIND, 1), unit_edges(units), [Level(4, 1e30)]).seconds
    assert ours <= theirs * (1 + 1e-5)


def test_the_stages_divide_the_units_and_the_devices() -> None:
    file = towers(5, 3, 4)
    result = _run(file, 7, micro_batch=8, bandwidth=1e9)
    assert sorted(u for stage in result.stages for u in stage.units) == list(range(19))
    assert sum(stage.replicas for stage in result.stages) <= 7
    assert {stage.micro_batch for stage in result.stages} <= {8, 4, 2}
    assert result == _run(file, 7, micro_batch=8, bandwidth=1e9)
