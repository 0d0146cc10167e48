"""What a layout takes, by list scheduling: the planner's judge.

One copy is scheduled with message delays; reduction of gradients and optimizer step follow
when a device, and all that share its parameters, are done.
"""

from __future__ import annotations

from typing import NamedTuple

from graphpipe.plan.problem import PipelineProblem
from graphpipe.plan.task_graph import TaskGraph
from graphpipe.planner.estimate import after_ns
from graphpipe.planner.layout import Layout
from graphpipe.planner.reschedule import Timed, reschedule
from graphpipe.planner.space import Space


class Score(NamedTuple):
    """``iteration_ns`` of a layout, and the schedule that takes it."""

    iteration_ns: int
    timed: Timed
    graph: TaskGraph


def score(space: Space, layout: Layout, rounds: int = 1) -> Score | None:
    """Schedules a layout with so many backward-forward rounds; None if it is not legal."""
    problem = space.problem(layout)
    if problem is None:
        return None
    structure = space.structure(layout.assign, layout.merged)
    assert structure is not None
    ranks = space.part_ranks(layout)
    after = [0] * space.cluster.world_size
    for part, extra in enumerate(after_ns(space, layout, structure, ranks)):
        for rank in ranks[part]:
            after[rank] = round(extra)
    found = reschedule(problem, delays(space, problem), after, rounds)
    if found is None:
        return None
    return Score(found[0].finish_ns, *found)


def delays(space: Space, problem: PipelineProblem) -> list[tuple[int, int]]:
    """By edge, nanoseconds of a message forward and backward, between the first replicas."""
    out = []
    stages = problem.stages
    for edge in problem.edges:
        source, target = stages[edge.source], stages[edge.target]
        here, there = source.devices[0], target.devices[0]
        if here == there and len(source.devices) > 1:
            there = source.devices[1]
        if here == there:
            out.append((0, 0))
            continue
        latency, bandwidth = space.cluster.link(here, there)
        size = min(source.micro_batch, target.micro_batch)
        scale = 0.0 if bandwidth is None else 1e9 / bandwidth
        out.append(
            (
                round(latency * 1e9 + (edge.forward_bytes * size + edge.forward_fixed) * scale),
                round(latency * 1e9 + (edge.backward_bytes * size + edge.backward_fixed) * scale),
            )
        )
    return out
