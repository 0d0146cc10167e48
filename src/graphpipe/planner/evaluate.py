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
    """``iteration_ns`` of a layout, and the schedule that takes it.

    ``exact`` is False where only the first micro-batches were scheduled and the others
    extrapolated at the rate of the busiest device; the schedule is then of those only.
    """

    iteration_ns: int
    timed: Timed
    graph: TaskGraph
    exact: bool


def score(
    space: Space,
    layout: Layout,
    *,
    rounds: int = 1,
    most_tasks: int | None = None,
    enough_ns: float = 0.0,
    hopeless_ns: float = float("inf"),
) -> Score | None:
    """Schedules a layout.

    Args:
        space: The search space.
        layout: The layout.
        rounds: Backward-forward rounds.
        most_tasks: Schedule only about so many tasks where there are more.
        enough_ns: No rounds for a schedule that is as short as this without,
        hopeless_ns: nor for one that is longer than this.

    Returns:
        None if the layout is not legal.
    """
    problem = space.problem(layout)
    if problem is None:
        return None
    structure = space.structure(layout.assign, layout.merged)
    assert structure is not None
    ranks = space.part_ranks(layout)
    # Schedulers are faster on as many ranks as one copy has.
    used = sorted({rank for stage in problem.stages for rank in stage.devices})
    number = {rank: i for i, rank in enumerate(used)}
    after = [0] * len(used)
    for part, extra in enumerate(after_ns(space, layout, structure, ranks)):
        for rank in ranks[part][: layout.replicas[part]]:
            if rank in number:
                after[number[rank]] = round(extra)
    waits = delays(space, problem, far=layout.far)
    samples = problem.samples
    shorter = samples if most_tasks is None else _shorter(problem, most_tasks)
    small = PipelineProblem(
        tuple(
            stage._replace(
                in_flight=min(stage.in_flight, shorter),
                devices=tuple(number[rank] for rank in stage.devices),
            )
            for stage in problem.stages
        ),
        problem.edges,
        shorter,
        len(used),
    )
    # More slack than there are samples, or another way to say the same, changes nothing.
    key = (small.stages, small.edges, samples, shorter, tuple(waits), tuple(after), rounds)
    if key in space.scores:
        known = space.scores[key]
        return None if known is None else _on_ranks(known, used, space.cluster.world_size)
    beyond = round(_busiest(small) * (samples - shorter) / shorter) if shorter < samples else 0
    found = reschedule(
        small,
        waits,
        after,
        rounds,
        enough_ns=enough_ns - beyond,
        hopeless_ns=hopeless_ns - beyond,
    )
    if found is None:
        space.scores[key] = None
        return None
    timed, graph = found
    result = Score(timed.finish_ns + beyond, timed, graph, shorter == samples)
    space.scores[key] = result
    return _on_ranks(result, used, space.cluster.world_size)


def _on_ranks(found: Score, used: list[int], world: int) -> Score:
    """The lists of a schedule under the numbers of its ranks in the cluster."""
    lines: list[list[int]] = [[] for _ in range(world)]
    for i, rank in enumerate(used):
        lines[rank] = found.timed.lines[i]
    return found._replace(timed=found.timed._replace(lines=lines))


def _busiest(problem: PipelineProblem) -> float:
    """Nanoseconds that the tasks of the busiest rank take."""
    busy = [0.0] * problem.world_size
    for stage in problem.stages:
        tasks = problem.samples / stage.micro_batch
        for rank in stage.devices:
            busy[rank] += tasks / stage.replicas * (stage.forward_ns + stage.backward_ns)
    return max(busy)


def _shorter(problem: PipelineProblem, most_tasks: int) -> int:
    """Samples that give about ``most_tasks`` tasks, enough to fill the pipeline twice."""
    samples = problem.samples
    tasks = sum(2 * -(-samples // stage.micro_batch) for stage in problem.stages)
    if tasks <= 1.25 * most_tasks:
        return samples
    step = max(stage.micro_batch * stage.replicas * stage.block for stage in problem.stages)
    deepest = max(stage.in_flight for stage in problem.stages)
    enough = max(samples * most_tasks // tasks, deepest + deepest // 2)
    shorter = -(-enough // step) * step
    return shorter if shorter < 0.8 * samples else samples


def delays(space: Space, problem: PipelineProblem, *, far: bool) -> list[tuple[int, int]]:
    """By edge, nanoseconds of a message forward and backward, between the first replicas.

    ``far``: the copies of a stage lie side by side, so that they use a shared network card
    at the same time.
    """
    out = []
    stages, devices = problem.stages, space.cluster.devices
    sharing = space.cluster.network.devices_per_nic
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
        if far and devices[here].node != devices[there].node:
            scale *= sharing
        out.append(
            (
                round(latency * 1e9 + (edge.forward_bytes * size + edge.forward_fixed) * scale),
                round(latency * 1e9 + (edge.backward_bytes * size + edge.backward_fixed) * scale),
            )
        )
    return out
