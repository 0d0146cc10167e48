"""The schedule of a plan for another mini-batch size or for an evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphpipe.plan.builders import build_schedule
from graphpipe.plan.builders.list_schedule import list_schedule
from graphpipe.plan.problem import problem_of
from graphpipe.plan.schedule import Schedule, Task

if TYPE_CHECKING:
    from graphpipe.plan.plan import Plan


def schedule_for(plan: Plan, batch_size: int | None = None, *, training: bool = True) -> Schedule:
    """The plan's own schedule where it fits, else one from the same builder (for lists made
    elsewhere, from the builder that ``auto`` chooses).

    A mini-batch that does not divide ends with short micro-batches; a copy that owns no
    sample gets empty lists.

    Args:
        plan: The plan.
        batch_size: Samples of the mini-batch, by default the plan's.
        training: False for an evaluation: forwards only.

    Raises:
        ScheduleError: if no schedule exists under the plan's in-flight bounds.
    """
    fits = batch_size is None or batch_size == plan.batch_size
    if training and fits and plan.schedule.lines:
        return plan.schedule
    old = plan.schedule
    lines: list[list[Task]] = [[] for _ in range(plan.world_size)]
    for copy in range(plan.copies):
        problem, _ = problem_of(plan, copy, batch_size, training=training)
        if old.builder == "list":
            built = list_schedule(problem, priority=old.priority, lead=old.lead or None)
        else:
            known = old.builder if old.builder in ("kfkb", "gpipe") else "auto"
            built = build_schedule(problem, known)
        for rank, line in enumerate(built.graph.tasks(built.lines)):
            lines[rank] += line
    return Schedule.of(lines, old.builder, priority=old.priority, lead=old.lead)
