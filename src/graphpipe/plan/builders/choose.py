"""The choice of a builder by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from graphpipe.plan.builders.built import Built, one_stage_per_rank
from graphpipe.plan.builders.gpipe import gpipe
from graphpipe.plan.builders.kfkb import kfkb
from graphpipe.plan.builders.list_schedule import best_list_schedule, list_schedule
from graphpipe.plan.problem import PipelineProblem
from graphpipe.plan.schedule import Priority

BuilderName = Literal["auto", "kfkb", "list", "gpipe"]


def build_schedule(
    problem: PipelineProblem,
    builder: str = "auto",
    *,
    priority: Priority | Literal["best"] = "best",
    lead: Sequence[int] | None = None,
    raise_bounds: bool = False,
) -> Built:
    """Builds with the named builder; ``auto`` is kFkB where every device hosts at most one
    stage, else list scheduling.

    Args:
        problem: One copy.
        builder: ``auto``, ``kfkb``, ``list`` or ``gpipe``.
        priority: Of list scheduling; ``best`` takes the one with the shortest schedule.
        lead: Of list scheduling.
        raise_bounds: Whether list scheduling may raise in-flight bounds that are too small.

    Raises:
        ScheduleError: if an in-flight bound is too small, or the builder does not fit.
        ValueError: for an unknown builder.
    """
    if builder == "auto":
        builder = "kfkb" if one_stage_per_rank(problem) else "list"
    if builder == "kfkb":
        return kfkb(problem)
    if builder == "gpipe":
        return gpipe(problem)
    if builder == "list":
        if priority == "best":
            return best_list_schedule(problem, lead=lead, raise_bounds=raise_bounds)
        return list_schedule(problem, priority=priority, lead=lead, raise_bounds=raise_bounds)
    raise ValueError(f"unknown builder {builder!r}; known are auto, kfkb, list, gpipe")
