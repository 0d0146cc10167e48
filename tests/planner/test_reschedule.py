"""Backward-forward passes keep every rule and never make the schedule longer."""

from __future__ import annotations

import pytest

from graphpipe.plan.builders import list_schedule
from graphpipe.plan.ordered import run_ordered
from graphpipe.plan.task_graph import TaskGraph
from graphpipe.planner.reschedule import reschedule
from tests.plan.random_problems import random_problem


@pytest.mark.parametrize("seed", range(60))
def test_schedules_are_complete_runnable_and_no_longer(seed: int) -> None:
    problem = random_problem(seed)
    delays = [(0, 0)] * len(problem.edges)
    after = [0] * problem.world_size
    found = reschedule(problem, delays, after, rounds=2)
    if found is None:
        with pytest.raises(Exception, match="in flight"):
            list_schedule(problem)
        return
    timed, graph = found
    assert sorted(t for line in timed.lines for t in line) == list(range(graph.count))
    # Fixed lists, run as they are, under all bounds: at most the promised time.
    run = run_ordered(TaskGraph(problem, bounded=True), timed.lines)
    assert run.makespan_ns <= timed.finish_ns
    greedy, _ = reschedule(problem, delays, after, rounds=0) or (None, None)
    assert greedy is not None
    assert timed.finish_ns <= greedy.finish_ns
    assert greedy.finish_ns == list_schedule(problem, delays_ns=delays).makespan_ns


@pytest.mark.parametrize("seed", range(20))
def test_what_follows_the_last_task_counts(seed: int) -> None:
    problem = random_problem(seed)
    delays = [(3, 5)] * len(problem.edges)
    after = [7 * rank for rank in range(problem.world_size)]
    found = reschedule(problem, delays, after)
    if found is None:
        return
    timed, _ = found
    ends = [timed.end[line[-1]] + after[r] for r, line in enumerate(timed.lines) if line]
    assert max(ends, default=0) <= timed.finish_ns
