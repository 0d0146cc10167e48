"""``Built``: what every schedule builder returns."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from graphpipe.errors import ScheduleError
from graphpipe.plan.problem import PipelineProblem
from graphpipe.plan.schedule import Priority, Schedule
from graphpipe.plan.task_graph import TaskGraph


class Built(NamedTuple):
    """A schedule of one copy.

    Attributes:
        lines: Task numbers (of ``graph``) by rank, in the order in which the rank runs them.
        end: End of every task in nanoseconds, by task number.
        makespan_ns: When the last task ends, without network contention, parameter
            all-reduce and optimizer.
        graph: The tasks. ``graph.problem`` is the problem that the lists obey; its in-flight
            bounds are higher than asked for where the builder was allowed to raise them.
        builder: ``kfkb``, ``list`` or ``gpipe``.
        priority: Of list scheduling.
    """

    lines: list[list[int]]
    end: list[int]
    makespan_ns: int
    graph: TaskGraph
    builder: str
    priority: Priority = "sample"

    @property
    def problem(self) -> PipelineProblem:
        """The problem that the lists obey."""
        return self.graph.problem

    def schedule(self) -> Schedule:
        """The lists as a record of a plan."""
        return Schedule.of(self.graph.tasks(self.lines), self.builder, priority=self.priority)


def one_stage_per_rank(problem: PipelineProblem) -> bool:
    """Whether no rank hosts more than one stage."""
    ranks = [rank for stage in problem.stages for rank in stage.devices]
    return len(set(ranks)) == len(ranks)


def require_one_stage_per_rank(problem: PipelineProblem, builder: str) -> None:
    """Refuses shared devices for builders that schedule each stage on its own.

    Raises:
        ScheduleError: naming the first rank that hosts several stages.
    """
    hosted: dict[int, list[int]] = defaultdict(list)
    for number, stage in enumerate(problem.stages):
        for rank in stage.devices:
            hosted[rank].append(number)
    for rank, stages in sorted(hosted.items()):
        if len(stages) > 1:
            raise ScheduleError(
                f"The {builder} builder is for one stage a device",
                where=f"rank {rank}",
                got=f"stages {', '.join(map(str, stages))} on it",
                fix="Use the list builder",
            )
