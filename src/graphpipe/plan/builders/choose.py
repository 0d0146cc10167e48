"""The choice of a builder by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from graphpipe.plan.builders.built import Built, one_stage_per_rank
from graphpipe.plan.builders.gpipe import gpipe
from graphpipe.plan.builders.kfkb import kfkb
from graphpipe.plan.builders.list_schedule import list_schedule
from graphpipe.plan.problem import PipelineProblem

BuilderName = Literal["auto", "kfkb", "list", "gpipe"]


def build_schedule(
    problem: PipelineProblem,
    builder: str = "auto",
    *,
    priority: str = "sample",
    lead: Sequence[int] | None = None,
    raise_bounds: bool = False,
) -> Built:
    """Builds with the named builder; ``auto`` is kFkB where every device hosts at most one
    stage, else list scheduling.

    Args:
        problem: One copy.
        builder: ``auto``, ``kfkb``, ``list`` or ``gpipe``.
        priority: Of list scheduling, ``sample`` or ``critical_path``.
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
        return list_schedule(
            problem,
            priority="critical_path" if priority == "critical_path" else "sample",
            lead=lead,
            raise_bounds=raise_bounds,
        )
    raise ValueError(f"unknown builder {builder!r}; known are auto, kfkb, list, gpipe")
