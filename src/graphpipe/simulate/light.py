"""Simulation of a problem without a plan: what planners call for every candidate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from graphpipe.cost.cluster import Cluster
from graphpipe.plan.ordered import OrderedRun, run_ordered
from graphpipe.plan.problem import PipelineProblem
from graphpipe.plan.task_graph import TaskGraph
from graphpipe.simulate.shared import run_shared

Network = Literal["channel", "shared", "free"]


class Simulated(NamedTuple):
    """``iteration_ns`` ends with the last optimizer step, ``run`` holds the tasks of one copy."""

    iteration_ns: int
    run: OrderedRun


def simulate_problem(
    problem: PipelineProblem,
    lines: Sequence[Sequence[int]],
    cluster: Cluster,
    *,
    network: Network = "channel",
    graph: TaskGraph | None = None,
    groups: Sequence[tuple[tuple[int, ...], int]] = (),
    optimizer_ns: Sequence[int] = (),
    record: bool = False,
) -> Simulated:
    """Simulates one iteration of one copy.

    Args:
        problem: Stages, edges and samples.
        lines: Task numbers by rank, as builders return them.
        cluster: Devices and network.
        network: ``channel`` (fast, exactly reproducible), ``shared`` (with contention), or
            ``free`` (messages take no time).
        graph: ``Built.graph``, to save making it again.
        groups: Parameter all-reduces in order: ranks and bytes.
        optimizer_ns: Optimizer step by rank; empty for none.
        record: Whether ``run.sent`` lists the messages.

    Raises:
        ScheduleError: if the lists deadlock.
    """
    tasks = graph if graph is not None else TaskGraph(problem, bounded=False)
    if network == "shared":
        (run,) = run_shared([(tasks, lines)], cluster, record=record)
    else:
        run = run_ordered(tasks, lines, None if network == "free" else cluster, record=record)
    if not groups and not optimizer_ns:
        return Simulated(run.makespan_ns, run)
    ends = finish([run], cluster, groups, optimizer_ns)
    return Simulated(max(run.makespan_ns, *(done.end_ns for done in ends)), run)


class Finish(NamedTuple):
    """What a rank does after its tasks. ``reduces`` holds (start, end) of its all-reduces in
    order, ``optimizer`` likewise, ``end_ns`` the rank's last moment."""

    reduces: list[tuple[int, int]]
    optimizer: tuple[int, int]
    end_ns: int


def finish(
    runs: Sequence[OrderedRun],
    cluster: Cluster,
    groups: Sequence[tuple[tuple[int, ...], int]],
    optimizer_ns: Sequence[int],
) -> list[Finish]:
    """All-reduces and optimizer steps after the tasks of all copies.

    A rank in a group first lets its network card finish. The groups run in order; each
    starts when all its ranks are there and takes ``Cluster.all_reduce_seconds``. The
    optimizer follows a rank's last all-reduce.
    """
    world = cluster.world_size
    time = [max(times) for times in zip(*(run.device for run in runs), strict=True)]
    card = [max(times) for times in zip(*(run.card for run in runs), strict=True)]
    for rank in {rank for ranks, _ in groups for rank in ranks}:
        time[rank] = max(time[rank], card[rank])
    reduces: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for ranks, nbytes in groups:
        start = max(time[rank] for rank in ranks)
        end = start + round(cluster.all_reduce_seconds(ranks, nbytes) * 1e9)
        for rank in ranks:
            time[rank] = end
            reduces[rank].append((start, end))
    out: list[Finish] = []
    for rank in range(world):
        step = optimizer_ns[rank] if optimizer_ns else 0
        out.append(Finish(reduces[rank], (time[rank], time[rank] + step), time[rank] + step))
    return out
