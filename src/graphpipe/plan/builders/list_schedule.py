"""List scheduling: play the whole cluster through; each idle device takes its best ready task.

It is the builder for devices that host several stages, and works for any problem. Under
the in-flight bounds, backwards go first (they free memory), then the micro-batch with the
lowest sample, then the stage with the longest way still to go.

On unbalanced stages a device that runs all the backwards that it has before the next forward
leaves those behind it without work: up to a sixth slower than 1F1B under the same bounds.
The priority ``turns`` therefore gives a forward its place behind the backward that makes room
for it; with one stage a device and blocks of one that is 1F1B.

Greedy schedules have anomalies: more room or faster tasks can make them slower. Judge by
the makespan, and try other slacks, priorities and leads; :func:`best_list_schedule` does so.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from heapq import heapify, heappop, heappush
from typing import Protocol

from graphpipe.errors import ScheduleError
from graphpipe.plan.builders.built import Built, one_stage_per_rank
from graphpipe.plan.builders.kfkb import kfkb
from graphpipe.plan.in_flight import find_cycle, reverse_topological_order
from graphpipe.plan.messages import returns_gradient
from graphpipe.plan.problem import PipelineProblem
from graphpipe.plan.schedule import Priority
from graphpipe.plan.task_graph import TaskGraph, lane_bound

PRIORITIES: tuple[Priority, ...] = ("sample", "turns", "critical_path")


def list_schedule(
    problem: PipelineProblem,
    *,
    priority: Priority = "sample",
    lead: Sequence[int] | None = None,
    slack: int | Sequence[int] = 0,
    delays_ns: Sequence[tuple[int, int]] | None = None,
    raise_bounds: bool = False,
) -> Built:
    """Schedules the tasks of one copy; the same input gives the same lists.

    Args:
        problem: ``in_flight`` is W_s; ``block`` plays no part.
        priority: Among ready forwards (and among ready backwards) of a device, ``sample``
            takes the lowest sample first, ``critical_path`` the stage with the longest way
            to the end of the iteration; ``turns`` takes backwards and forwards in turns, each
            forward behind the backward that makes room for it.
        lead: By stage, samples by which its tasks count as earlier (or, negative, later)
            under ``sample``: a lead lets an encoder's forwards slip ahead of a trunk's.
        slack: Quanta (r_s b_s k_s samples) to add to W_s, for every stage or by stage.
        delays_ns: By edge, nanoseconds of a message forward and backward, without
            contention; they count where the ranks differ.
        raise_bounds: Raise in-flight bounds that are too small to run at all, a quantum at
            a time, instead of refusing them.

    Returns:
        Lists, end times and makespan; ``Built.problem`` has the bounds with slack and raises.

    Raises:
        ScheduleError: if a bound is too small and may not be raised; it names the stage.
    """
    if slack:
        problem = _with_slack(problem, slack)
    while True:
        graph = TaskGraph(problem, bounded=True)
        keys = priority_keys(graph, priority, lead)
        far = None if delays_ns is None else split_far(graph, delays_ns)
        lines, end, stalled = play(graph, keys, far)
        if not stalled:
            return Built(lines, end, max(end, default=0), graph, "list", priority)
        stage = _blocking_stage(graph, stalled)
        spec = problem.stages[stage]
        if not raise_bounds:
            raise ScheduleError(
                "Too few samples may be in flight: the stage waits for itself",
                where=f"stage {stage}",
                expected=f"more than W = {spec.in_flight} samples",
                fix="Raise the stage's in_flight, or let the builder raise it",
            )
        problem = _with_slack(problem, [int(s == stage) for s in range(len(problem.stages))])


def best_list_schedule(
    problem: PipelineProblem, *, lead: Sequence[int] | None = None, raise_bounds: bool = False
) -> Built:
    """The shortest schedule over all priorities, and kFkB where each device has one stage; the
    first of equals.

    Args:
        problem: See :func:`list_schedule`.
        lead: Likewise.
        raise_bounds: Likewise.

    Raises:
        ScheduleError: if a bound is too small and may not be raised; it names the stage.
    """
    made = [
        list_schedule(problem, priority=item, lead=lead, raise_bounds=raise_bounds)
        for item in PRIORITIES
    ]
    if one_stage_per_rank(problem):
        # Its bounds may not do where they had to be raised for the lists.
        with suppress(ScheduleError):  # strict lists may need more than these bounds
            made.append(kfkb(made[0].problem))
    return min(made, key=lambda built: built.makespan_ns)


def _with_slack(problem: PipelineProblem, slack: int | Sequence[int]) -> PipelineProblem:
    """W_s of every stage raised by its quanta of slack, at most to all samples."""
    stages = []
    for number, spec in enumerate(problem.stages):
        quanta = slack if isinstance(slack, int) else slack[number]
        room = spec.in_flight + quanta * spec.micro_batch * spec.replicas * spec.block
        most = max(problem.samples, spec.in_flight)
        stages.append(spec._replace(in_flight=min(room, most)))
    return PipelineProblem(tuple(stages), problem.edges, problem.samples, problem.world_size)


def priority_keys(graph: TaskGraph, priority: Priority, lead: Sequence[int] | None) -> list[int]:
    """The priority of every task, smaller first, with the task number in the low bits."""
    problem = graph.problem
    shift = graph.count.bit_length()
    leads = lead if lead is not None else [0] * len(problem.stages)
    top = max(leads, default=0)
    span = problem.samples + top - min(leads, default=0) + 1
    forward_rank, backward_rank = _ranks_by_way_to_go(problem)
    ranks = len(problem.stages)
    if priority == "turns":
        return _keys_in_turns(graph, forward_rank, backward_rank, leads)
    by_sample = priority == "sample"
    keys = [0] * graph.count
    for number, spec in enumerate(problem.stages):
        tasks = graph.micro_batches[number]
        starts = [(graph.forward[number], 1, forward_rank[number])]
        if spec.has_backward:
            starts.append((graph.backward[number], 0, backward_rank[number]))
        for start, kind, way in starts:
            if by_sample:
                first = (kind * span + top - leads[number]) * ranks + way
                step = spec.micro_batch * ranks
            else:
                first = (kind * ranks + way) * span
                step = spec.micro_batch
            keys[start : start + tasks] = [
                (first + i * step) << shift | (start + i) for i in range(tasks)
            ]
    return keys


def _keys_in_turns(
    graph: TaskGraph,
    forward_rank: Sequence[int],
    backward_rank: Sequence[int],
    leads: Sequence[int],
) -> list[int]:
    """Keys by the sample of a backward, or of the backward that a forward has to wait for."""
    problem = graph.problem
    shift = graph.count.bit_length()
    ranks = len(problem.stages)
    rooms = [
        spec.replicas * lane_bound(spec.in_flight, spec.replicas, spec.micro_batch)
        for spec in problem.stages
    ]
    # So that no key is negative.
    base = max(
        room * spec.micro_batch + abs(lead)
        for room, spec, lead in zip(rooms, problem.stages, leads, strict=True)
    )
    keys = [0] * graph.count
    for number, spec in enumerate(problem.stages):
        room, size = rooms[number], spec.micro_batch
        group = size * spec.replicas * spec.block
        here, back = graph.forward[number], graph.backward[number]
        for i in range(graph.micro_batches[number]):
            first = base - leads[number]
            if back >= 0:
                turn = first + i * size // group * group
                keys[back + i] = (2 * turn * ranks + backward_rank[number]) << shift | (back + i)
                before = first + (i - room) * size // group * group
                keys[here + i] = ((2 * before + 1) * ranks + forward_rank[number]) << shift | (
                    here + i
                )
            else:
                turn = first + (i - room) * size
                keys[here + i] = ((2 * turn + 1) * ranks + forward_rank[number]) << shift | (
                    here + i
                )
    return keys


def _ranks_by_way_to_go(problem: PipelineProblem) -> tuple[list[int], list[int]]:
    """Stages ranked by the time from a forward, and from a backward, to the end of the
    iteration along the longest path of one micro-batch; the longest way has rank 0."""
    stages = problem.stages
    consumers: list[list[int]] = [[] for _ in stages]
    producers: list[list[int]] = [[] for _ in stages]
    for number, edge in enumerate(problem.edges):
        consumers[edge.source].append(edge.target)
        if returns_gradient(problem, number):
            producers[edge.target].append(edge.source)
    order = reverse_topological_order(consumers)
    backward = [0] * len(stages)
    for s in reversed(order):
        before = max((backward[p] for p in producers[s]), default=0)
        backward[s] = stages[s].backward_ns + before
    forward = [0] * len(stages)
    for s in order:
        after = max((forward[c] for c in consumers[s]), default=0)
        forward[s] = stages[s].forward_ns + max(after, backward[s])
    return _ranks(forward), _ranks(backward)


def _ranks(ways: list[int]) -> list[int]:
    out = [0] * len(ways)
    for place, stage in enumerate(sorted(range(len(ways)), key=lambda s: (-ways[s], s))):
        out[stage] = place
    return out


def split_far(
    graph: TaskGraph, delays_ns: Sequence[tuple[int, int]]
) -> list[list[tuple[int, int]]]:
    """Moves the dependencies that a message serves from ``graph.successors`` to lists of
    (task, delay) by task. Changes ``graph.successors``."""
    waits: list[dict[int, int]] = [{} for _ in graph.problem.stages]
    for edge, (there, back) in zip(graph.problem.edges, delays_ns, strict=True):
        waits[edge.source][edge.target] = there
        waits[edge.target][edge.source] = back
    stage, rank, successors = graph.stage, graph.rank, graph.successors
    far: list[list[tuple[int, int]]] = [[] for _ in range(graph.count)]
    for t, items in enumerate(successors):
        r, wait_of = rank[t], waits[stage[t]]
        for item in items:
            if rank[item] != r and wait_of[stage[item]]:
                break
        else:
            continue
        near: list[int] = []
        late = far[t]
        for item in items:
            wait = wait_of[stage[item]] if rank[item] != r else 0
            if wait:
                late.append((item, wait))
            else:
                near.append(item)
        successors[t] = near
    return far


class Playable(Protocol):
    """What :func:`play` looks at: a task graph, or one with its dependencies turned round."""

    problem: PipelineProblem
    count: int
    rank: list[int]
    duration: list[int]
    missing: list[int]
    successors: list[list[int]]


def play(
    graph: Playable,
    keys: list[int],
    far: list[list[tuple[int, int]]] | None,
    free: Sequence[int] | None = None,
) -> tuple[list[list[int]], list[int], list[int]]:
    """Plays the cluster through. Returns lists, end times, and the tasks that never ran.

    Args:
        graph: The tasks.
        keys: Priority of every task, smaller first, the task number in the low
            ``count.bit_length()`` bits.
        far: For every task the (task, delay) pairs that wait for a message from it.
        free: Time at which each rank can first run a task; 0 by default.

    Events are integers, ``time << shift | number``; numbers from ``graph.count`` on stand for
    the arrival of a message for task ``number - graph.count``.
    """
    count, rank, duration = graph.count, graph.rank, graph.duration
    missing, successors = graph.missing.copy(), graph.successors
    world = graph.problem.world_size
    shift = (2 * count).bit_length()
    mask = (1 << shift) - 1
    key_mask = (1 << count.bit_length()) - 1
    lines: list[list[int]] = [[] for _ in range(world)]
    end = [0] * count
    ready: list[list[int]] = [[] for _ in range(world)]
    busy = [False] * world
    for t in range(count):
        if not missing[t]:
            ready[rank[t]].append(keys[t])
    for queue in ready:
        heapify(queue)
    events: list[int] = []
    wake = list(range(world))
    if free is not None:
        # An event that ends no task: number 2 * count + rank.
        shift = (2 * count + world).bit_length()
        mask = (1 << shift) - 1
        events = [free[r] << shift | (2 * count + r) for r in wake if free[r] > 0]
        heapify(events)
        busy = [free[r] > 0 for r in wake]
    now = 0
    while True:
        for r in wake:
            if not busy[r] and (queue := ready[r]):
                t = heappop(queue) & key_mask
                busy[r] = True
                lines[r].append(t)
                heappush(events, (now + duration[t]) << shift | t)
        if not events:
            break
        event = heappop(events)
        now = event >> shift
        limit = (now + 1) << shift
        wake = []
        while True:
            t = event & mask
            if t < count:
                end[t] = now
                r = rank[t]
                busy[r] = False
                wake.append(r)
                for item in successors[t]:
                    if missing[item] == 1:
                        r = rank[item]
                        heappush(ready[r], keys[item])
                        wake.append(r)
                    missing[item] -= 1
                if far is not None:
                    for item, delay in far[t]:
                        heappush(events, (now + delay) << shift | (count + item))
            elif t < 2 * count:
                t -= count
                missing[t] -= 1
                if not missing[t]:
                    r = rank[t]
                    heappush(ready[r], keys[t])
                    wake.append(r)
            else:
                busy[t - 2 * count] = False
                wake.append(t - 2 * count)
            if events and events[0] < limit:
                event = heappop(events)
            else:
                break
    return lines, end, [t for t in range(count) if missing[t]]


def _blocking_stage(graph: TaskGraph, stalled: list[int]) -> int:
    """A stage whose in-flight bound closes a cycle among the tasks that never ran."""
    before: dict[int, list[int]] = {t: [] for t in stalled}
    whole = TaskGraph(graph.problem, bounded=True)
    for t in stalled:
        for item in whole.successors[t]:
            if item in before:
                before[item].append(t)
    predecessors = [before.get(t, []) for t in range(graph.count)]
    cycle = find_cycle(predecessors, stalled)
    consumers = {(edge.source, edge.target) for edge in graph.problem.edges}
    for t, earlier in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        here, there = graph.task(t), graph.task(earlier)
        if here.kind != "F":
            continue
        own = there.kind == "B" and there.stage == here.stage
        credit = there.kind == "F" and (here.stage, there.stage) in consumers
        if own or credit:
            return here.stage
    raise AssertionError("data dependencies form a cycle")
