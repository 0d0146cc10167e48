"""The virtual clock in the real messages equals the simulator's channel model exactly."""

from __future__ import annotations

import pytest

from graphpipe.plan.plan import Plan
from graphpipe.runtime.emulate import emulate
from graphpipe.simulate.simulator import simulate
from graphpipe.simulate.timeline import Timeline
from tests.runtime.random_plans import random_plan


def _key(timeline: Timeline) -> list[tuple[object, ...]]:
    return sorted(
        (e.rank, e.kind, e.stage, e.micro_batch, e.start_ns, e.end_ns) for e in timeline.events
    )


def _agrees(plan: Plan, emulated: Timeline) -> None:
    simulated = simulate(plan, network="channel")
    assert _key(emulated) == _key(simulated)
    assert emulated.iteration_ns == simulated.iteration_ns


@pytest.mark.parametrize("seed", range(60))
def test_virtual_clock_equals_the_simulator_in_one_process(seed: int) -> None:
    plan = random_plan(seed)
    _agrees(plan, emulate(plan, processes=False))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1600))
def test_virtual_clock_equals_the_simulator_on_many_plans(seed: int) -> None:
    plan = random_plan(seed, most_stages=16)
    _agrees(plan, emulate(plan, processes=False))


@pytest.mark.parametrize(("seed", "stages"), [(3, 4), (12, 12)])
def test_virtual_clock_equals_the_simulator_over_gloo(seed: int, stages: int) -> None:
    plan = random_plan(seed, most_stages=stages, shared=False)
    _agrees(plan, emulate(plan, timeout=60))


def test_by_sleeping_the_iteration_takes_what_was_simulated() -> None:
    plan = random_plan(5, most_stages=4, shared=False)
    simulated = simulate(plan, network="channel")
    emulated = emulate(plan, clock="sleep", timeout=60)
    assert [key[:4] for key in _key(emulated)] == [key[:4] for key in _key(simulated)]
    # Sleeping is never short; how long it is beyond that, the machine decides.
    assert emulated.iteration_ns >= simulated.iteration_ns * 0.99
