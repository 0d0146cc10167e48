"""Memory of every rank over time: the steps of :mod:`graphpipe.plan.memory`, with times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphpipe.plan.actions import ActionLists, Ordering, build_actions
from graphpipe.plan.memory import memory_steps
from graphpipe.plan.schedule import Task
from graphpipe.simulate.timeline import Timeline

if TYPE_CHECKING:
    from graphpipe.plan.plan import Plan

Curve = tuple[tuple[int, int], ...]
"""Steps (time in nanoseconds, bytes from then on); several at one time where a moment's
peak is higher than what follows."""


def memory_curves(
    plan: Plan,
    timeline: Timeline,
    *,
    batch_size: int | None = None,
    training: bool = True,
    ordering: Ordering = "channel",
    lookahead: int = 1,
    actions: ActionLists | None = None,
) -> tuple[Curve, ...]:
    """Bytes held by each rank over time; the maxima are ``Timeline.peak_memory``.

    Args:
        plan: The plan.
        timeline: Times of its tasks, predicted or measured.
        batch_size: Samples of the mini-batch, by default the plan's.
        training: False for an evaluation.
        ordering: How receives are posted, see :func:`graphpipe.plan.actions.build_actions`.
        lookahead: Likewise.
        actions: The lists, where they exist already.
    """
    lists = actions
    if lists is None:
        lists = build_actions(
            plan, batch_size, training=training, ordering=ordering, lookahead=lookahead
        )
    times: dict[tuple[int, Task], tuple[int, int]] = {}
    for event in timeline.events:
        if event.kind == "F" or event.kind == "B":
            task = Task(event.kind, event.stage, event.micro_batch)
            times[event.rank, task] = (event.start_ns, event.end_ns)
    curves: list[Curve] = []
    for rank, steps in enumerate(memory_steps(plan, lists, batch_size, training=training)):
        now = 0
        curve: list[tuple[int, int]] = []
        for step in steps:
            if step.task is not None:
                now = max(now, times[rank, step.task][0 if step.phase == "start" else 1])
            curve.append((now, step.held))
        curves.append(tuple(curve))
    return tuple(curves)


def peaks(curves: tuple[Curve, ...]) -> tuple[int, ...]:
    """The most that each rank holds, bytes."""
    return tuple(max(held for _, held in curve) for curve in curves)
