"""``Schedule``: for every device the ordered list of its tasks, as data."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Literal, NamedTuple

from pydantic import field_validator

from graphpipe.records import Record

TaskKind = Literal["F", "B"]
_TASK = re.compile(r"([FB])(\d{1,6})\.(\d{1,9})\Z")


class Task(NamedTuple):
    """One task: kind, stage id, and number of the micro-batch *within its copy*.

    The copy follows from the device: a device belongs to one copy.
    """

    kind: TaskKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"


def parse_task(text: str) -> Task:
    """Reads ``F2.0``: forward, stage 2, micro-batch 0.

    Raises:
        ValueError: if the text is not a task.
    """
    found = _TASK.match(text)
    if found is None:
        raise ValueError(f"{text!r} is not a task such as F2.0 or B1.3")
    kind: TaskKind = "F" if found[1] == "F" else "B"
    return Task(kind, int(found[2]), int(found[3]))


Priority = Literal["sample", "turns", "critical_path"]
"""Priorities of list scheduling, see ``graphpipe.plan.builders.list_schedule``."""


class Schedule(Record):
    """``lines[rank]`` is that device's task list, written ``"F0.0 F0.1 B0.0 B0.1"``.

    Text keeps a plan file readable and small; ``tasks`` is the parsed form.
    """

    lines: tuple[str, ...]
    builder: str = ""
    """Name of the builder that made it: ``kfkb``, ``list`` or ``gpipe``."""
    priority: Priority = "sample"
    """For ``list``: its priority, to build alike for another mini-batch size."""
    lead: tuple[int, ...] = ()
    """For ``list``: its leads by stage, empty for none."""

    @classmethod
    def of(
        cls,
        tasks: Iterable[Iterable[Task]],
        builder: str = "",
        *,
        priority: Priority = "sample",
        lead: Iterable[int] = (),
    ) -> Schedule:
        """The schedule with these task lists, one for each rank."""
        lines = tuple(" ".join(str(task) for task in line) for line in tasks)
        return cls(lines=lines, builder=builder, priority=priority, lead=tuple(lead))

    @cached_property
    def tasks(self) -> tuple[tuple[Task, ...], ...]:
        """The task lists by rank."""
        return tuple(tuple(parse_task(item) for item in line.split()) for line in self.lines)

    @field_validator("lines")
    @classmethod
    def _readable(cls, lines: tuple[str, ...]) -> tuple[str, ...]:
        for line in lines:
            for item in line.split():
                parse_task(item)
        return lines
