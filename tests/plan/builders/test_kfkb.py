"""kFkB: the order of published schedules, any number of micro-batches, closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.errors import ScheduleError
from graphpipe.plan.builders import kfkb
from graphpipe.plan.in_flight import with_bounds
from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec
from tests.plan.builders.test_list_schedule import check_lists
from tests.plan.random_problems import random_problem


def chain(sizes: list[int], samples: int, forward: int = 1, backward: int = 2) -> PipelineProblem:
    stages = tuple(
        StageSpec(b, 1, 1, 1, (i,), forward * b, backward * b) for i, b in enumerate(sizes)
    )
    edges = tuple(EdgeSpec(i, i + 1) for i in range(len(sizes) - 1))
    return with_bounds(PipelineProblem(stages, edges, samples, len(sizes)))


def text(problem: PipelineProblem) -> list[str]:
    return list(kfkb(problem).schedule().lines)


def test_1f1b() -> None:
    assert text(chain([1, 1], 4)) == [
        "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3",
        "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3",
    ]


def test_true_blocks() -> None:
    assert text(chain([4, 1], 8)) == [
        "F0.0 F0.1 B0.0 B0.1",
        "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3 F1.4 B1.4 F1.5 B1.5 F1.6 B1.6 F1.7 B1.7",
    ]
    assert text(chain([1, 4], 12))[0] == (
        "F0.0 F0.1 F0.2 F0.3 F0.4 F0.5 F0.6 F0.7 B0.0 B0.1 B0.2 B0.3 "
        "F0.8 F0.9 F0.10 F0.11 B0.4 B0.5 B0.6 B0.7 B0.8 B0.9 B0.10 B0.11"
    )


def test_fewer_micro_batches_than_stages_and_one_alone() -> None:
    assert text(chain([1, 1, 1], 1)) == ["F0.0 B0.0", "F1.0 B1.0", "F2.0 B2.0"]
    assert text(chain([4, 4, 4], 6))[0] == "F0.0 F0.1 B0.0 B0.1"


def test_a_short_last_micro_batch_takes_its_share_of_the_time() -> None:
    assert kfkb(chain([4], 6)).makespan_ns == 6 * 3


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_equal_stages_take_the_closed_form(stages: int, count: int) -> None:
    assert kfkb(chain([1] * stages, count)).makespan_ns == (count + stages - 1) * 3


def test_replicas_take_turns() -> None:
    stages = (StageSpec(1, 2, 1, 2, (0, 1), 1, 2),)
    assert text(PipelineProblem(stages, (), 5, 2)) == [
        "F0.0 B0.0 F0.2 B0.2 F0.4 B0.4",
        "F0.1 B0.1 F0.3 B0.3",
    ]


@given(seed=st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_lists_are_right_for_any_problem_with_one_stage_a_device(seed: int) -> None:
    check_lists(kfkb(random_problem(seed, shared=False)))


def test_two_stages_on_a_device_are_refused() -> None:
    stages = (StageSpec(1, 1, 1, 1, (0,), 1, 2), StageSpec(1, 1, 1, 1, (0,), 1, 2))
    with pytest.raises(ScheduleError, match=r"at rank 0.*stages 0, 1 on it.*list builder"):
        kfkb(PipelineProblem(stages, (), 4, 1))


def test_a_bound_too_small_is_refused_with_the_tasks_that_wait() -> None:
    stages = (StageSpec(2, 1, 1, 4, (0,), 1, 2), StageSpec(8, 1, 1, 8, (1,), 4, 8))
    with pytest.raises(ScheduleError, match=r"rank 0 at B0.0 waits for B1.0.*F0.2"):
        kfkb(PipelineProblem(stages, (EdgeSpec(0, 1),), 16, 2))
