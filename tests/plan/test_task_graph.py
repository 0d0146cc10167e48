"""The task graph: numbers, durations, dependencies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.errors import ScheduleError
from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec
from graphpipe.plan.schedule import Task
from graphpipe.plan.task_graph import TaskGraph, lane_bound
from tests.plan.random_problems import random_problem


def names(graph: TaskGraph) -> dict[str, set[str]]:
    """What each task waits for."""
    out: dict[str, set[str]] = {str(graph.task(t)): set() for t in range(graph.count)}
    for t in range(graph.count):
        for item in graph.successors[t]:
            out[str(graph.task(item))].add(str(graph.task(t)))
    return out


def test_dependencies_of_mixed_sizes() -> None:
    stages = (StageSpec(2, 1, 2, 4, (0,), 2, 4), StageSpec(4, 1, 1, 4, (1,), 4, 8))
    graph = TaskGraph(PipelineProblem(stages, (EdgeSpec(0, 1),), 6, 2), bounded=False)
    assert names(graph) == {
        "F0.0": set(),
        "F0.1": set(),
        "F0.2": set(),
        "B0.0": {"F0.0", "B1.0"},
        "B0.1": {"F0.1", "B1.0"},
        "B0.2": {"F0.2", "B1.1"},
        "F1.0": {"F0.0", "F0.1"},
        "F1.1": {"F0.2"},
        "B1.0": {"F1.0"},
        "B1.1": {"F1.1"},
    }
    assert graph.duration[graph.forward[1] : graph.forward[1] + 2] == [4, 2]


def test_bounds_and_order_are_dependencies_too() -> None:
    problem = PipelineProblem((StageSpec(1, 1, 1, 2, (0,), 1, 2),), (), 3, 1)
    assert names(TaskGraph(problem, bounded=True)) == {
        "F0.0": set(),
        "F0.1": {"F0.0"},
        "F0.2": {"F0.1", "B0.0"},
        "B0.0": {"F0.0"},
        "B0.1": {"F0.1", "B0.0"},
        "B0.2": {"F0.2", "B0.1"},
    }


@given(seed=st.integers(0, 10**6), bounded=st.booleans())
@settings(max_examples=60, deadline=None)
def test_numbers_and_tasks_are_one_to_one(seed: int, bounded: bool) -> None:
    graph = TaskGraph(random_problem(seed), bounded=bounded)
    for number in range(graph.count):
        task = graph.task(number)
        assert graph.number(task) == number
        spec = graph.problem.stages[task.stage]
        assert graph.stage[number] == task.stage
        assert graph.rank[number] == spec.devices[task.micro_batch % spec.replicas]
        full = spec.forward_ns if task.kind == "F" else spec.backward_ns
        assert graph.duration[number] == full * graph.samples_of(number) // spec.micro_batch
        assert graph.first_sample(number) == task.micro_batch * spec.micro_batch
    waits = [0] * graph.count
    for items in graph.successors:
        for item in items:
            waits[item] += 1
    assert waits == graph.missing


@pytest.mark.parametrize(
    "task", [Task("F", 1, 0), Task("F", 0, 3), Task("F", 0, -1), Task("B", 0, 0)]
)
def test_tasks_that_do_not_exist_are_refused(task: Task) -> None:
    problem = PipelineProblem((StageSpec(1, 1, 1, 2, (0,), 1, 0, False),), (), 3, 1)
    with pytest.raises(ScheduleError, match="does not have"):
        TaskGraph(problem, bounded=False).number(task)


def test_a_copy_without_samples_has_no_tasks() -> None:
    problem = PipelineProblem((StageSpec(1, 1, 1, 2, (0,), 1, 2),), (), 0, 1)
    assert TaskGraph(problem, bounded=True).count == 0


def test_lane_bound_is_in_micro_batches_of_one_replica() -> None:
    assert [lane_bound(*args) for args in ((24, 1, 8), (24, 3, 8), (20, 2, 8), (1, 1, 8))] == [
        3,
        1,
        2,
        1,
    ]
