"""Memory over time."""

from __future__ import annotations

from graphpipe.plan.memory import peak_memory
from graphpipe.plan.stage import StageMemory
from graphpipe.simulate.memory import memory_curves, peaks
from graphpipe.simulate.simulator import simulate
from tests.plan.plans import plan_of
from tests.plan.random_problems import random_problem

MEMORY = StageMemory(parameters=50, saved_per_micro_batch=9, workspace=4, recompute=2)


def test_curves_rise_and_fall_in_time_and_their_maxima_are_the_peaks() -> None:
    for seed in range(20):
        plan = plan_of(random_problem(seed), memory=MEMORY)
        timeline = simulate(plan)
        curves = memory_curves(plan, timeline)
        assert peaks(curves) == timeline.peak_memory == peak_memory(plan)
        for rank, curve in enumerate(curves):
            times = [time for time, _ in curve]
            assert times == sorted(times)
            assert times[0] == 0
            assert times[-1] <= timeline.iteration_ns
            assert curve[0][1] == curve[-1][1] == plan.static_bytes(rank)


def test_an_evaluation_saves_nothing() -> None:
    plan = plan_of(random_problem(4), memory=MEMORY)
    timeline = simulate(plan, training=False)
    curves = memory_curves(plan, timeline, training=False)
    assert peaks(curves) == timeline.peak_memory
    assert all(a <= b for a, b in zip(peaks(curves), simulate(plan).peak_memory, strict=True))


def test_steps_stand_at_the_times_of_the_tasks() -> None:
    plan = plan_of(random_problem(11, most_stages=1), memory=MEMORY)
    timeline = simulate(plan)
    times = {0} | {t for e in timeline.events for t in (e.start_ns, e.end_ns)}
    assert {time for curve in memory_curves(plan, timeline) for time, _ in curve} <= times
