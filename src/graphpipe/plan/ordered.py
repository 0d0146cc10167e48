"""When tasks and messages happen if every rank runs its list in order: the *channel* model.

The model is defined so that each rank can compute its own times from its own state and the
times that the messages it receives carry; a virtual clock in the runtime gives exactly the
same integers. Each rank r keeps two clocks, both 0 at the start of the iteration:

``device[r]``
    when its last task ended. A task starts at the latest of ``device[r]`` and the arrival
    times of all messages that it needs, and ends its duration later; ``device[r]`` becomes
    that end. What it needs from tasks on the same rank is done by then, because the rank's
    list holds them earlier.
``card[r]``
    when its network card has sent the last byte of what it was given so far. When a task
    has ended, its messages go out in a fixed order: forwards (or gradients) by number of
    the edge, then by number of the receiving micro-batch; then credits likewise. For each,
    ``card[r] = max(card[r], end of the task) + wire`` and the message *arrives* at
    ``card[r] + latency``. ``wire`` is ``Cluster.transfer_ns(source, target, nbytes)`` and
    ``latency`` is ``Cluster.latency_ns(source, target)``, both rounded to nanoseconds;
    a credit has 0 bytes. The message carries its arrival time.

So a rank's messages leave one after another in task order whatever their targets, which
makes every ordered pair of ranks a FIFO; the receiving side is never a bottleneck, and
tasks never wait for a card.

With fixed lists nothing is left to decide, so all times are longest paths: one pass over
the tasks in any order that respects the dependencies, without an event queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphpipe.cost.cluster import Cluster
from graphpipe.errors import ScheduleError
from graphpipe.plan.task_graph import TaskGraph

Wire = tuple[int, int, int, int]
"""A message to be sent: receiving task, nanoseconds on the wire, latency, bytes."""


class Sent(NamedTuple):
    """A message that was sent: between which tasks, when its first byte left (nanoseconds)
    and when its last byte arrived."""

    source: int
    target: int
    start_ns: int
    arrival_ns: int
    nbytes: int


class OrderedRun(NamedTuple):
    """Times in nanoseconds.

    Attributes:
        end: End of each task.
        order: The tasks, each after everything that it waits for.
        makespan_ns: The last end of a task.
        device: End of the last task of each rank.
        card: When each rank's network card is free.
        sent: All messages, in the order in which each rank sends them, if recorded;
            without network none are sent.
    """

    end: list[int]
    order: list[int]
    makespan_ns: int
    device: list[int]
    card: list[int]
    sent: list[Sent]


def run_ordered(
    graph: TaskGraph,
    lines: Sequence[Sequence[int]],
    cluster: Cluster | None = None,
    *,
    record: bool = False,
) -> OrderedRun:
    """Runs the task lists, one for each rank, under the channel model.

    Args:
        graph: The tasks; bounded or not.
        lines: Task numbers by rank; every task exactly once, on its own rank.
        cluster: The network; None for messages that take no time.
        record: Whether to return the messages.

    Raises:
        ScheduleError: if the lists deadlock; it names the tasks that wait for one another.
    """
    missing = graph.missing.copy()
    duration, rank = graph.duration, graph.rank
    if cluster is None or is_free(cluster):
        near, far = graph.successors, None
    else:
        near, far = wires(graph, cluster)
    ready = [0] * graph.count
    end = [0] * graph.count
    order: list[int] = []
    sent: list[Sent] = []
    place = [0] * len(lines)
    device = [0] * len(lines)
    card = [0] * len(lines)
    sizes = [len(line) for line in lines]
    head = [line[0] if line else -1 for line in lines]
    stack = [r for r, first in enumerate(head) if first >= 0 and not missing[first]]
    while stack:
        r = stack.pop()
        line, at, now, size = lines[r], place[r], device[r], sizes[r]
        task = head[r]
        while not missing[task]:
            start = ready[task]
            if start > now:
                now = start
            now += duration[task]
            end[task] = now
            order.append(task)
            for item in near[task]:
                missing[item] -= 1
                if ready[item] < now:
                    ready[item] = now
                if not missing[item]:
                    other = rank[item]
                    if head[other] == item and other != r:
                        stack.append(other)
            if far is not None and far[task]:
                free = card[r] if card[r] > now else now
                for item, wire, latency, nbytes in far[task]:
                    free += wire
                    arrival = free + latency
                    if record:
                        sent.append(Sent(task, item, free - wire, arrival, nbytes))
                    missing[item] -= 1
                    if ready[item] < arrival:
                        ready[item] = arrival
                    if not missing[item]:
                        other = rank[item]
                        if head[other] == item:
                            stack.append(other)
                card[r] = free
            at += 1
            if at == size:
                task = -1
                break
            task = line[at]
        place[r], device[r], head[r] = at, now, task
    if len(order) < graph.count:
        raise deadlock(graph, lines, place)
    return OrderedRun(end, order, max(device, default=0), device, card, sent)


def linear_extension(run: OrderedRun) -> list[int]:
    """The tasks in one global order that respects every dependency: by end time, tasks that
    end together as in ``run.order``. Reproducible on every rank."""
    place = [0] * len(run.order)
    for position, task in enumerate(run.order):
        place[task] = position
    return sorted(run.order, key=lambda task: (run.end[task], place[task]))


def deadlock(
    graph: TaskGraph, lines: Sequence[Sequence[int]], place: Sequence[int]
) -> ScheduleError:
    """The error for lists that stand still with ``place[r]`` tasks of rank r done."""
    done = [False] * graph.count
    for line, at in zip(lines, place, strict=True):
        for task in line[:at]:
            done[task] = True
    stuck = [
        (r, line[at]) for r, (line, at) in enumerate(zip(lines, place, strict=True))
        if at < len(line)
    ]  # fmt: skip
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


def is_free(cluster: Cluster) -> bool:
    """Whether messages take no time at all."""
    net = cluster.network
    links = [(net.inter_node_latency, net.inter_node_bandwidth)] if len(cluster.nodes) > 1 else []
    links += [cluster.node_link(node) for node in range(len(cluster.nodes))]
    return all(not latency and bandwidth is None for latency, bandwidth in links)


def wires(graph: TaskGraph, cluster: Cluster) -> tuple[list[list[int]], list[list[Wire]]]:
    """Splits the successors of every task into those on its own rank and those that a
    message serves, in sending order. See :mod:`graphpipe.plan.messages` for what is sent."""
    rank, stage, successors = graph.rank, graph.stage, graph.successors
    near: list[list[int]] = []
    far: list[list[Wire]] = []
    nothing: list[Wire] = []
    cache: dict[tuple[int, int, bool, int, int, int, bool], tuple[int, int, int]] = {}
    low, high, back = _sample_ranges(graph)
    rates = _rates(graph)
    for t in range(graph.count):
        r = rank[t]
        items = successors[t]
        for item in items:
            if rank[item] != r:
                break
        else:
            near.append(items)
            far.append(nothing)
            continue
        s, low_t, high_t, back_t = stage[t], low[t], high[t], back[t]
        own: list[int] = []
        out: list[Wire] = []
        for item in items:
            other = rank[item]
            if other == r:
                own.append(item)
                continue
            start = low[item]
            first = start <= low_t if back_t else start >= low_t
            count = min(high[item], high_t) - max(start, low_t)
            pair = (s, stage[item], back_t)
            key = (*pair, r, other, count, first)
            found = cache.get(key)
            if found is None:
                # A pair that is no edge in this direction is a credit: it has no bytes.
                per_sample, fixed = rates.get(pair, (0.0, 0.0))
                nbytes = round(per_sample * count + (fixed if first else 0.0))
                wire = cluster.transfer_ns(r, other, nbytes) if nbytes else 0
                found = (wire, cluster.latency_ns(r, other), nbytes)
                cache[key] = found
            out.append((item, *found))
        near.append(own)
        far.append(out)
    return near, far


def _sample_ranges(graph: TaskGraph) -> tuple[list[int], list[int], list[bool]]:
    """First sample, last sample + 1, and whether it is a backward, of every task."""
    low: list[int] = []
    high: list[int] = []
    back: list[bool] = []
    samples = graph.problem.samples
    for number, spec in enumerate(graph.problem.stages):
        starts = list(range(0, samples, spec.micro_batch))
        stops = [start + spec.micro_batch for start in starts]
        if stops:
            stops[-1] = samples
        for backward in (False, True) if spec.has_backward else (False,):
            low += starts
            high += stops
            back += [backward] * graph.micro_batches[number]
    return low, high, back


def _rates(graph: TaskGraph) -> dict[tuple[int, int, bool], tuple[float, float]]:
    """Bytes per sample and fixed, by (sending stage, receiving stage, backward)."""
    rates: dict[tuple[int, int, bool], tuple[float, float]] = {}
    for edge in graph.problem.edges:
        rates[edge.source, edge.target, False] = (edge.forward_bytes, edge.forward_fixed)
        rates[edge.target, edge.source, True] = (edge.backward_bytes, edge.backward_fixed)
    return rates
