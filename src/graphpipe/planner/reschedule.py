"""Better orders on devices that host several stages: schedule backwards, then forwards again.

A greedy schedule takes what is ready now and cannot know what the end of the iteration
needs. Played in reverse (the last task first), greed serves the end; the order in which the
reversed schedule starts its tasks is then the priority for a forward pass, and so on in
turns. This is the forward-backward improvement of project scheduling (Li and Willis 1992;
Valls, Ballestin and Quintanilla 2005), here on the task graph of a pipeline: in-flight
bounds are precedence constraints like any other and so hold in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from graphpipe.plan.builders.list_schedule import play, priority_keys, split_far
from graphpipe.plan.problem import PipelineProblem
from graphpipe.plan.schedule import Priority
from graphpipe.plan.task_graph import TaskGraph


class Timed(NamedTuple):
    """Task numbers by rank in order, the end of each task, and the end of the iteration:
    the last end on each rank plus what follows there (reduction, optimizer), nanoseconds."""

    lines: list[list[int]]
    end: list[int]
    finish_ns: int


@dataclass
class _Reversed:
    """A task graph with all dependencies turned round, as far as ``play`` looks."""

    problem: PipelineProblem
    count: int
    rank: list[int]
    duration: list[int]
    missing: list[int]
    successors: list[list[int]]


def reschedule(
    problem: PipelineProblem,
    delays_ns: Sequence[tuple[int, int]],
    after_ns: Sequence[int],
    rounds: int = 1,
    *,
    order: Sequence[Sequence[int]] = (),
    priority: Priority = "sample",
    lead: Sequence[int] | None = None,
    enough_ns: float = 0.0,
    hopeless_ns: float = float("inf"),
) -> tuple[Timed, TaskGraph] | None:
    """Schedules the tasks of one copy.

    Args:
        problem: The problem; ``in_flight`` bounds hold in the result.
        delays_ns: By edge, nanoseconds of a message forward and backward.
        after_ns: By rank, what follows its last task.
        rounds: Backward-forward rounds after the first forward pass.
        order: Lists of task numbers that must run one after the other in this order.
        priority: Of the first forward pass, see ``graphpipe.plan.builders.list_schedule``.
        lead: Likewise.
        enough_ns: No more rounds once the schedule is as short as this.
        hopeless_ns: Nor if the first pass is longer than this.

    Returns:
        The best schedule found, and its tasks; None if the in-flight bounds or the order
        deadlock.
    """
    graph = TaskGraph(problem, bounded=True)
    for line in order:
        for task, following in pairwise(line):
            graph.successors[task].append(following)
            graph.missing[following] += 1
    keys = priority_keys(graph, priority, lead)
    far = split_far(graph, delays_ns)
    lines, end, stalled = play(graph, keys, far)
    if stalled:
        return None
    best = Timed(lines, end, _finish(graph, lines, end, after_ns))
    if best.finish_ns <= enough_ns or best.finish_ns > hopeless_ns:
        return best, graph
    if rounds:
        turned, turned_far = _turn(graph, far)
    shift = graph.count.bit_length()
    for _ in range(rounds):
        before = best.finish_ns
        last = max(end)
        keys = [(last - e) << shift | t for t, e in enumerate(end)]
        lines, reverse_end, stalled = play(turned, keys, turned_far, after_ns)
        assert not stalled
        # The reversed schedule, read from its end, is a schedule too.
        last = max(reverse_end)
        end = [last - e + d for e, d in zip(reverse_end, graph.duration, strict=True)]
        lines = [line[::-1] for line in lines]
        if last < best.finish_ns:
            best = Timed(lines, end, last)
        keys = [(last - e) << shift | t for t, e in enumerate(reverse_end)]
        lines, end, stalled = play(graph, keys, far)
        assert not stalled
        finish = _finish(graph, lines, end, after_ns)
        if finish < best.finish_ns:
            best = Timed(lines, end, finish)
        if best.finish_ns >= before or best.finish_ns <= enough_ns:
            break
    return best, graph


def _turn(
    graph: TaskGraph, far: list[list[tuple[int, int]]]
) -> tuple[_Reversed, list[list[tuple[int, int]]]]:
    successors: list[list[int]] = [[] for _ in range(graph.count)]
    turned_far: list[list[tuple[int, int]]] = [[] for _ in range(graph.count)]
    missing = [0] * graph.count
    for t, items in enumerate(graph.successors):
        for item in items:
            successors[item].append(t)
        missing[t] = len(items) + len(far[t])
    for t, arrivals in enumerate(far):
        for item, delay in arrivals:
            turned_far[item].append((t, delay))
    turned = _Reversed(graph.problem, graph.count, graph.rank, graph.duration, missing, successors)
    return turned, turned_far


def _finish(
    graph: TaskGraph, lines: list[list[int]], end: list[int], after_ns: Sequence[int]
) -> int:
    return max(
        (end[line[-1]] + after_ns[rank] for rank, line in enumerate(lines) if line), default=0
    )
