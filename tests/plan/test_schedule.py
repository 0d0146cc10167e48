"""Schedules as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from graphpipe.plan.schedule import Schedule, Task, parse_task

tasks = st.builds(
    Task, st.sampled_from(["F", "B"]), st.integers(0, 999_999), st.integers(0, 999_999_999)
)


@given(task=tasks)
def test_a_task_survives_its_text(task: Task) -> None:
    assert parse_task(str(task)) == task


@given(lines=st.lists(st.lists(tasks, max_size=5), max_size=4))
def test_a_schedule_survives_its_text(lines: list[list[Task]]) -> None:
    schedule = Schedule.of(lines, "kfkb")
    assert [list(line) for line in schedule.tasks] == lines
    assert Schedule.model_validate_json(schedule.model_dump_json()) == schedule


@pytest.mark.parametrize("text", ["", "F", "F1", "G1.2", "F-1.2", "F1.2.3", "f1.2", "F1.2\n"])
def test_what_is_no_task_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a task"):
        parse_task(text)


def test_a_line_with_something_else_is_refused() -> None:
    with pytest.raises(ValidationError, match="'what' is not a task"):
        Schedule(lines=("F0.0 what",))
