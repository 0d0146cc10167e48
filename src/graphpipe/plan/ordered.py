"""When tasks run if every rank runs its list in order and messages take a fixed time.

With fixed lists nothing is left to decide, so start times are longest paths: one pass over
the tasks in any order that respects the dependencies, without an event queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphpipe.errors import ScheduleError
from graphpipe.plan.task_graph import TaskGraph


class OrderedRun(NamedTuple):
    """``end[t]`` is the end of task t in nanoseconds; ``order`` lists the tasks so that each
    comes after everything that it waits for; ``makespan_ns`` is the last end."""

    end: list[int]
    order: list[int]
    makespan_ns: int


def run_ordered(graph: TaskGraph, lines: Sequence[Sequence[int]]) -> OrderedRun:
    """Runs the task lists, one for each rank, without communication time.

    Args:
        graph: The tasks; bounded or not.
        lines: Task numbers by rank; every task exactly once, on its own rank.

    Raises:
        ScheduleError: if the lists deadlock; it names the tasks that wait for one another.
    """
    missing = graph.missing.copy()
    successors, duration, rank = graph.successors, graph.duration, graph.rank
    ready = [0] * graph.count
    end = [0] * graph.count
    order: list[int] = []
    place = [0] * len(lines)
    free = [0] * len(lines)
    sizes = [len(line) for line in lines]
    head = [line[0] if line else -1 for line in lines]
    stack = [r for r, first in enumerate(head) if first >= 0 and not missing[first]]
    while stack:
        r = stack.pop()
        line, at, now, size = lines[r], place[r], free[r], sizes[r]
        task = head[r]
        while not missing[task]:
            start = ready[task]
            if start > now:
                now = start
            now += duration[task]
            end[task] = now
            order.append(task)
            for item in successors[task]:
                missing[item] -= 1
                if ready[item] < now:
                    ready[item] = now
                if not missing[item]:
                    other = rank[item]
                    if head[other] == item and other != r:
                        stack.append(other)
            at += 1
            if at == size:
                task = -1
                break
            task = line[at]
        place[r], free[r], head[r] = at, now, task
    if len(order) < graph.count:
        raise deadlock(graph, lines, place)
    return OrderedRun(end, order, max(free, default=0))


def deadlock(
    graph: TaskGraph, lines: Sequence[Sequence[int]], place: Sequence[int]
) -> ScheduleError:
    """The error for lists that stand still with ``place[r]`` tasks of rank r done."""
    done = [False] * graph.count
    for line, at in zip(lines, place, strict=True):
        for task in line[:at]:
            done[task] = True
    stuck = [(r, line[at]) for r, (line, at) in enumerate(zip(lines, place, strict=True))
             if at < len(line)]  # fmt: skip
    waits: dict[int, list[int]] = {task: [] for _, task in stuck}
    for t in range(graph.count):
        if not done[t]:
            for item in graph.successors[t]:
                if item in waits:
                    waits[item].append(t)
    listed = {t for line in lines for t in line}
    shown = "; ".join(
        f"rank {r} at {graph.task(task)} waits for "
        + ", ".join(
            f"{graph.task(t)}" + ("" if t in listed else " (in no list)") for t in waits[task][:3]
        )
        for r, task in stuck[:4]
    )
    return ScheduleError(
        "The schedule deadlocks: tasks wait for one another",
        where=shown or None,
        fix="Allow more samples in flight in the stages named, or let a builder make the lists",
    )
