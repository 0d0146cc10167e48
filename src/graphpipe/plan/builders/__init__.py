"""Builders of schedules: a problem in, ordered task lists and their makespan out."""

from graphpipe.plan.builders.built import Built
from graphpipe.plan.builders.choose import BuilderName, build_schedule
from graphpipe.plan.builders.gpipe import gpipe
from graphpipe.plan.builders.kfkb import kfkb
from graphpipe.plan.builders.list_schedule import best_list_schedule, list_schedule

__all__ = [
    "BuilderName",
    "Built",
    "best_list_schedule",
    "build_schedule",
    "gpipe",
    "kfkb",
    "list_schedule",
]
