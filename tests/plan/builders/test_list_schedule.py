"""List scheduling: complete, in order, within bounds, deterministic, never stuck."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.errors import ScheduleError
from graphpipe.plan.builders import Built, best_list_schedule, kfkb, list_schedule
from graphpipe.plan.in_flight import with_bounds
from graphpipe.plan.ordered import run_ordered
from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec
from tests.plan.random_problems import random_problem


def check_lists(built: Built) -> None:
    """Every task once, on its rank, in order within a replica, under the bound."""
    graph, problem = built.graph, built.problem
    assert sorted(t for line in built.lines for t in line) == list(range(graph.count))
    for rank, line in enumerate(built.lines):
        held: dict[int, int] = {}
        last: dict[tuple[str, int], int] = {}
        for task in graph.tasks([line])[0]:
            spec = problem.stages[task.stage]
            assert spec.devices[task.micro_batch % spec.replicas] == rank
            assert last.get((task.kind, task.stage), -1) < task.micro_batch
            last[task.kind, task.stage] = task.micro_batch
            if spec.has_backward:
                held[task.stage] = held.get(task.stage, 0) + (1 if task.kind == "F" else -1)
                bound = -(-spec.in_flight // (spec.micro_batch * spec.replicas))
                assert held[task.stage] <= max(1, bound)


@given(seed=st.integers(0, 10**6), priority=st.sampled_from(["sample", "critical_path"]))
@settings(max_examples=150, deadline=None)
def test_lists_are_right_for_any_problem(seed: int, priority: str) -> None:
    problem = random_problem(seed)
    built = list_schedule(problem, priority=priority, raise_bounds=True)  # type: ignore[arg-type]
    check_lists(built)
    # Played in the fixed order without waiting for priorities the tasks end at the same times.
    run = run_ordered(built.graph, built.lines)
    assert run.makespan_ns == built.makespan_ns
    assert run.end == built.end
    assert built.lines == list_schedule(problem, priority=priority, raise_bounds=True).lines  # type: ignore[arg-type]


@given(seed=st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_the_formula_always_suffices_to_run(seed: int) -> None:
    check_lists(list_schedule(random_problem(seed, frozen=False)))


@given(seed=st.integers(0, 10**6), delay=st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_delays_only_move_tasks(seed: int, delay: int) -> None:
    problem = random_problem(seed)
    built = list_schedule(
        problem, delays_ns=[(delay, 2 * delay)] * len(problem.edges), raise_bounds=True
    )
    check_lists(built)


def starved() -> PipelineProblem:
    stages = (StageSpec(2, 1, 1, 4, (0,), 1, 2), StageSpec(8, 1, 1, 8, (1,), 4, 8))
    return PipelineProblem(stages, (EdgeSpec(0, 1),), 16, 2)


def test_too_small_a_bound_is_refused_by_name_or_raised() -> None:
    with pytest.raises(ScheduleError, match=r"at stage 0\).*more than W = 4 samples"):
        list_schedule(starved())
    built = list_schedule(starved(), raise_bounds=True)
    assert [s.in_flight for s in built.problem.stages] == [8, 8]
    check_lists(built)


def test_two_branches_and_the_join_on_two_devices() -> None:
    """A head of one branch and the tail of the other share a device and wait for nobody."""
    stages = (
        StageSpec(1, 1, 1, 1, (0,), 4, 8),
        StageSpec(1, 1, 1, 1, (1,), 4, 8),
        StageSpec(1, 1, 1, 1, (0,), 2, 4),
        StageSpec(1, 1, 1, 1, (1,), 2, 4),
    )
    edges = (EdgeSpec(0, 2), EdgeSpec(1, 2), EdgeSpec(2, 3))
    problem = with_bounds(PipelineProblem(stages, edges, 40, 2), slack=1)
    built = list_schedule(problem)
    work = 40 * 18
    assert built.makespan_ns <= work + 2 * 18


def test_lead_lets_a_branch_slip_ahead() -> None:
    stages = (StageSpec(1, 1, 1, 8, (0,), 1, 1), StageSpec(1, 1, 1, 8, (0,), 1, 1))
    problem = PipelineProblem(stages, (), 4, 1)
    plain = list_schedule(problem).graph.tasks(list_schedule(problem).lines)[0]
    eager = list_schedule(problem, lead=[0, 2])
    tasks = [str(task) for task in eager.graph.tasks(eager.lines)[0]]
    assert str(plain[0]) == "F0.0"
    assert tasks[0] == "F1.0"


def test_unknown_length_of_work_does_not_matter_for_one_device() -> None:
    problem = PipelineProblem((StageSpec(1, 1, 1, 1, (0,), 1, 2),), (), 4, 1)
    assert list_schedule(problem).makespan_ns == kfkb(problem).makespan_ns == 12


def test_slack_raises_the_bounds_of_the_result() -> None:
    problem = with_bounds(starved())
    built = list_schedule(problem, slack=[1, 0])
    quantum = problem.stages[0].block * 2
    assert built.problem.stages[0].in_flight == min(16, problem.stages[0].in_flight + quantum)
    assert built.problem.stages[1].in_flight == problem.stages[1].in_flight


def _unbalanced(seed: int, sizes: tuple[int, ...] = (1,)) -> PipelineProblem:
    """One stage a device with very different times."""
    rng = Random(seed)
    count = rng.randint(2, 8)
    chosen = [rng.choice(sizes) for _ in range(count)]
    stages = tuple(
        StageSpec(size, 1, 1, 1, (i,), size * rng.randint(20, 60), size * rng.randint(40, 120))
        for i, size in enumerate(chosen)
    )
    edges = tuple(EdgeSpec(rng.randrange(t), t) for t in range(1, count))
    if rng.random() < 0.6:
        edges = tuple(EdgeSpec(i, i + 1) for i in range(count - 1))
    samples = rng.choice([8, 16, 32])
    return with_bounds(PipelineProblem(stages, edges, samples, count), slack=rng.choice([0, 1]))


@pytest.mark.parametrize("seed", range(40))
def test_in_turns_it_is_1f1b_with_one_stage_a_device(seed: int) -> None:
    """Backward first is up to a fifth slower here, under the same bounds."""
    problem = _unbalanced(seed)
    turns = list_schedule(problem, priority="turns")
    assert turns.makespan_ns <= 1.05 * kfkb(problem).makespan_ns


@pytest.mark.parametrize("seed", range(20))
def test_the_best_is_never_slower_than_kfkb_with_one_stage_a_device(seed: int) -> None:
    problem = _unbalanced(seed, sizes=(1, 2, 4))
    best = best_list_schedule(problem)
    assert best.makespan_ns <= kfkb(problem).makespan_ns
    check_lists(best)


def test_backward_first_is_slower_on_some_unbalanced_stages() -> None:
    ratios = [
        list_schedule(problem).makespan_ns / list_schedule(problem, priority="turns").makespan_ns
        for problem in map(_unbalanced, range(40))
    ]
    assert max(ratios) > 1.05
    assert all(
        best_list_schedule(problem).makespan_ns <= list_schedule(problem).makespan_ns
        for problem in map(_unbalanced, range(10))
    )


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_in_turns_lists_are_right_for_any_problem(seed: int) -> None:
    check_lists(list_schedule(random_problem(seed), priority="turns", raise_bounds=True))
