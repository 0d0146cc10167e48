"""The *shared* network model: links are shared fairly by the messages under way.

A message within a node uses its sender's outgoing and its receiver's incoming link, each of
the node's bandwidth. A message between nodes uses the network card of its sender, outgoing,
and that of its receiver, incoming, each of the inter-node bandwidth; devices may share a
card. A message moves at the smaller of the fair shares (capacity divided by the messages
under way) of what it uses. Between the same two ranks, messages follow one another in task
order. Latency follows the last byte. The tasks of a rank run in the order of its list.

Shares change whenever a message begins or ends, so this model is a discrete-event
simulation; ends are rounded up to whole nanoseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import ceil

from graphpipe.cost.cluster import Cluster
from graphpipe.plan.ordered import OrderedRun, Sent, Wire, deadlock, wires
from graphpipe.plan.task_graph import TaskGraph

_TASK, _ARRIVAL, _FLOW = 0, 1, 2


class _Network:
    """Messages under way and how fast each moves. A flow is a slot in parallel lists."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.capacity: list[float] = []
        self.users: list[set[int]] = []
        self.ports: dict[tuple[str, object], int] = {}
        self.left: list[float] = []
        self.rate: list[float] = []
        self.since: list[int] = []
        self.version: list[int] = []
        self.uses: list[tuple[int, int]] = []
        self.routes: dict[tuple[int, int], tuple[int, int] | None] = {}
        self.dirty: set[int] = set()

    def route(self, source: int, target: int) -> tuple[int, int] | None:
        """The two ports that a message uses; None where it takes no time."""
        key = (source, target)
        if key not in self.routes:
            _, bandwidth = self.cluster.link(source, target)
            if bandwidth is None:
                self.routes[key] = None
            elif self.cluster.devices[source].node == self.cluster.devices[target].node:
                self.routes[key] = (
                    self._port(("out", source), bandwidth),
                    self._port(("in", target), bandwidth),
                )
            else:
                nics = self.cluster.nics
                self.routes[key] = (
                    self._port(("card out", nics[source]), bandwidth),
                    self._port(("card in", nics[target]), bandwidth),
                )
        return self.routes[key]

    def _port(self, name: tuple[str, object], bandwidth: float) -> int:
        if name not in self.ports:
            self.ports[name] = len(self.capacity)
            self.capacity.append(bandwidth / 1e9)
            self.users.append(set())
        return self.ports[name]

    def begin(self, now: int, uses: tuple[int, int], nbytes: int) -> int:
        """Starts a flow and returns its number."""
        flow = len(self.left)
        self.left.append(float(nbytes))
        self.rate.append(0.0)
        self.since.append(now)
        self.version.append(0)
        self.uses.append(uses)
        for port in uses:
            self.users[port].add(flow)
            self.dirty.add(port)
        return flow

    def finish(self, flow: int) -> None:
        """Ends a flow."""
        self.version[flow] += 1
        for port in self.uses[flow]:
            self.users[port].discard(flow)
            self.dirty.add(port)

    def settle(self, now: int) -> list[tuple[int, int, int]]:
        """New (end, flow, version) of every flow whose share changed."""
        users, capacity = self.users, self.capacity
        flows: set[int] = set()
        for port in self.dirty:
            flows |= users[port]
        self.dirty.clear()
        out: list[tuple[int, int, int]] = []
        for flow in sorted(flows):
            out_port, in_port = self.uses[flow]
            leaving = capacity[out_port] / len(users[out_port])
            arriving = capacity[in_port] / len(users[in_port])
            rate = leaving if leaving < arriving else arriving
            if rate == self.rate[flow]:
                continue
            self.left[flow] -= self.rate[flow] * (now - self.since[flow])
            self.rate[flow], self.since[flow] = rate, now
            self.version[flow] += 1
            end = now + max(0, ceil(self.left[flow] / rate - 1e-6))
            out.append((end, flow, self.version[flow]))
        return out


def run_shared(
    parts: Sequence[tuple[TaskGraph, Sequence[Sequence[int]]]],
    cluster: Cluster,
    *,
    record: bool = False,
) -> list[OrderedRun]:
    """Runs the task lists of all copies together under the shared model.

    Args:
        parts: For each copy its tasks and their lists by rank; copies share no rank.
        cluster: Devices and network.
        record: Whether to return the messages.

    Returns:
        A run for each copy; ``card`` is when the last message of each rank has left.

    Raises:
        ScheduleError: if the lists deadlock.
    """
    world = cluster.world_size
    part_of: list[int] = [-1] * world
    for number, (_, lines) in enumerate(parts):
        for rank, line in enumerate(lines):
            if line:
                part_of[rank] = number
    network = _Network(cluster)
    split = [wires(graph, cluster) for graph, _ in parts]
    missing = [graph.missing.copy() for graph, _ in parts]
    end = [[0] * graph.count for graph, _ in parts]
    order: list[list[int]] = [[] for _ in parts]
    sent: list[list[Sent]] = [[] for _ in parts]
    place, device, card = [0] * world, [0] * world, [0] * world
    busy = [False] * world
    queues: dict[tuple[int, int], deque[tuple[int, Wire]]] = {}
    active: dict[tuple[int, int], int] = {}
    flows: dict[int, tuple[int, int, int, Wire, int]] = {}
    events: list[tuple[int, int, int, int, int]] = []  # time, kind, rank or flow, item, version
    now = 0
    wake = list(range(world))

    def send_next(source: int, target: int) -> None:
        """Starts what waits for this ordered pair of ranks, until a message takes time."""
        pair = (source, target)
        queue = queues[pair]
        while queue and pair not in active:
            task, wire = queue.popleft()
            uses = network.route(source, target)
            if uses is None or not wire[3]:
                leave(source, task, wire, now)
            else:
                flow = network.begin(now, uses, wire[3])
                active[pair] = flow
                flows[flow] = (source, target, task, wire, now)

    def leave(source: int, task: int, wire: Wire, start: int) -> None:
        card[source] = max(card[source], now)
        arrival = now + wire[2]
        if record:
            sent[part_of[source]].append(Sent(task, wire[0], start, arrival, wire[3]))
        heappush(events, (arrival, _ARRIVAL, part_of[source], wire[0], 0))

    while True:
        for rank in wake:
            number = part_of[rank]
            if number < 0 or busy[rank]:
                continue
            graph, lines = parts[number]
            line = lines[rank]
            if place[rank] < len(line) and not missing[number][line[place[rank]]]:
                task = line[place[rank]]
                busy[rank] = True
                heappush(events, (now + graph.duration[task], _TASK, rank, task, 0))
        if network.dirty:
            for stop, flow, version in network.settle(now):
                heappush(events, (stop, _FLOW, flow, 0, version))
        if not events:
            break
        now = events[0][0]
        wake = []
        while events and events[0][0] == now:
            _, kind, subject, item, version = heappop(events)
            if kind == _TASK:
                rank = subject
                number = part_of[rank]
                end[number][item] = device[rank] = now
                order[number].append(item)
                place[rank] += 1
                busy[rank] = False
                wake.append(rank)
                near, far = split[number]
                for other in near[item]:
                    missing[number][other] -= 1
                for wire in far[item]:
                    peer = parts[number][0].rank[wire[0]]
                    queues.setdefault((rank, peer), deque()).append((item, wire))
                    send_next(rank, peer)
            elif kind == _ARRIVAL:
                missing[subject][item] -= 1
                if not missing[subject][item]:
                    wake.append(parts[subject][0].rank[item])
            elif network.version[subject] == version:
                network.finish(subject)
                source, target, task, wire, start = flows.pop(subject)
                del active[source, target]
                leave(source, task, wire, start)
                send_next(source, target)
    runs: list[OrderedRun] = []
    for number, (graph, lines) in enumerate(parts):
        if len(order[number]) < graph.count:
            raise deadlock(graph, lines, place)
        mine = [rank for rank in range(world) if part_of[rank] == number]
        makespan = max((device[rank] for rank in mine), default=0)
        runs.append(
            OrderedRun(
                end[number],
                order[number],
                makespan,
                [device[r] if part_of[r] == number else 0 for r in range(world)],
                [card[r] if part_of[r] == number else 0 for r in range(world)],
                sent[number],
            )
        )
    return runs
