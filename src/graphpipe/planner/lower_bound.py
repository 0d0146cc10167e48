"""A provable lower bound on the iteration time of every plan, and what lies above it.

``docs/lower-bound.md`` states the model and proves each part; in short:

Notation. Units are the finest sets of ops that a rule keeps in one stage. For unit u,
``f_u(b)`` and ``w_u(b)`` are its forward and backward time for a micro-batch of b samples,
and e_u = min over b of (f_u(b) + w_u(b)) / b is the least time per sample that any
micro-batch size gives, over all kinds of device. N is the number of devices, a slower
device counting by its best ratio to the fastest. Within a task the units of a stage run one
after the other, so a plan is also a schedule of units, and the following hold for it:

Work. Every sample passes every unit once, forward and backward, on some device, and every
trainable parameter is updated on at least one: T >= (sum of B e_u + optimizer) / N.

Fill and drain. The forward of u on any sample begins no earlier than the longest chain of
forwards above it (r_u), and the rest of that sample's way (down to the loss and back up)
follows it (q_u); likewise for its backward. All work with release at least r and tail at
least q is done in [r, T - q]: T >= r + q + (that work) / N, for every r and q.

Indivisible units. If u is held by p devices (replicas times copies), one of them serves at
least B / p samples, between r_u and T - q_u, and the gradient of its parameters is reduced
over all p after the last backward: T >= min over p of
r_u + B e_u / p + max(q_u, all-reduce over p + optimizer).

Packing. Suppose a plan of time T. Units for which no p >= 2 satisfies the last inequality
are held by one device each. Of the k N + 1 largest of them, k + 1 share a device:
T >= the sum of the k + 1 smallest of these. The least T without such a contradiction is a
bound; it is found by bisection, since what contradicts T contradicts every smaller time.

Way. Large micro-batches make work cheap and the way of the first sample long: see
``graphpipe.planner.way_bound``.

Times are rounded to nanoseconds in a simulation; the bound is lowered by what rounding can
gain: half a nanosecond per task of a unit, and one per unit and direction for a short last
micro-batch, which takes its share of the full one's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphpipe.cost.cluster import Cluster
from graphpipe.cost.table import CostTable
from graphpipe.graph.coarsen import forced_groups
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.edges import gradient_ops
from graphpipe.plan.plan import Plan
from graphpipe.planner.way_bound import UnitTimes, way_bound
from graphpipe.simulate.simulator import simulate

FloatArray = npt.NDArray[np.float64]

_HALF_NS = 0.5e-9
_THRESHOLDS = 256
"""Releases that the fill-and-drain part tries (evenly among the distinct ones)."""


@dataclass(frozen=True)
class LowerBound:
    """The bound and its parts, seconds of one iteration.

    Attributes:
        seconds: The largest part, less what rounding can gain; never negative.
        work: Total work at the best efficiency, over all devices.
        fill_drain: Work that has to wait for its ancestors and be followed by others.
        indivisible: The unit that bounds most, replicated as well as its all-reduce allows.
        indivisible_ops: The ops of that unit.
        indivisible_devices: How many devices would hold it.
        packing: Units too costly to replicate, on this many devices.
        way: Work at sizes of micro-batches that one sample's way also has to pay for.
        ideal_work: Device-seconds of compute at the best efficiency (without optimizer).
        capacity: Devices, the slower ones counted in part.
    """

    seconds: float
    work: float
    fill_drain: float
    indivisible: float
    indivisible_ops: tuple[str, ...]
    indivisible_devices: int
    packing: float
    way: float
    ideal_work: float
    capacity: float

    @property
    def nanoseconds(self) -> int:
        """The bound rounded down."""
        return int(self.seconds * 1e9)

    @property
    def binding(self) -> str:
        """Name of the part that is largest."""
        parts = ("work", "way", "fill_drain", "indivisible", "packing")
        return max(parts, key=lambda name: float(getattr(self, name)))


def lower_bound(
    graph: ModelGraph, costs: CostTable, cluster: Cluster, batch_size: int
) -> LowerBound:
    """A time that no plan for this input can beat. See the module for the proof.

    Args:
        graph: The graph.
        costs: Its costs on every kind of device in the cluster.
        cluster: The devices.
        batch_size: B, samples of a mini-batch.

    Raises:
        CostError: if a kind of device has no costs.
    """
    return _Bound(graph, costs, cluster, batch_size).solve()


class _Bound:
    def __init__(
        self, graph: ModelGraph, costs: CostTable, cluster: Cluster, batch_size: int
    ) -> None:
        self.graph, self.costs, self.cluster, self.batch = graph, costs, cluster, batch_size
        self.units = forced_groups(graph)
        self._starts = np.cumsum([0] + [len(unit) for unit in self.units])[:-1]
        self._order = np.array([op for unit in self.units for op in unit], dtype=np.intp)
        self._connect()
        self._time()
        self._measure_parameters()
        self._walk()

    def _connect(self) -> None:
        owner = {op: u for u, unit in enumerate(self.units) for op in unit}
        ops = self.graph.ops
        reached = gradient_ops(self.graph)
        self.predecessors: list[list[int]] = []
        self.gradient_to: list[list[int]] = []
        for u, unit in enumerate(self.units):
            above: set[int] = set()
            trained: set[int] = set()
            for op in unit:
                for source in self.graph.predecessors[op]:
                    v = owner.get(source, u)
                    if v == u:
                        continue
                    above.add(v)
                    if ops[op].name in reached and ops[source].name in reached:
                        output = ops[source].output
                        if output is None or output.requires_grad:
                            trained.add(v)
            self.predecessors.append(sorted(above))
            self.gradient_to.append(sorted(trained))
        # As the plan has it: what the loss does not depend on has no backward.
        self.has_backward = [any(ops[op].name in reached for op in unit) for unit in self.units]

    def _time(self) -> None:
        """Least seconds per sample of every unit, by direction and together."""
        sizes = sorted({b for b in self.costs.micro_batches if b <= self.batch} | {self.batch})
        count = len(self.units)
        forward = np.full(count, np.inf)
        backward = np.full(count, np.inf)
        both: dict[str, FloatArray] = {}
        tables: dict[str, FloatArray] = {}
        for kind in self.cluster.kinds:
            rows = []
            factors = self.costs.corrections.get(kind, (1.0, 1.0))
            best = np.full(count, np.inf)
            for size in sizes:
                halves, whole = [], []
                for seconds, factor in zip(self.costs.op_seconds(kind, size), factors, strict=True):
                    total = np.add.reduceat(seconds[self._order], self._starts) * factor
                    total = np.where(np.isnan(total), np.inf, total)
                    whole.append(np.maximum(0.0, total - _HALF_NS))
                    halves.append(whole[-1] / size)
                forward = np.minimum(forward, halves[0])
                backward = np.minimum(backward, halves[1])
                best = np.minimum(best, halves[0] + halves[1])
                rows.append(whole)
            both[kind] = best
            tables[kind] = np.array(rows)
        # A unit that cannot run anywhere bounds nothing: there is no plan to be beaten.
        self.forward = np.where(np.isfinite(forward), forward, 0.0)
        self.backward = np.where(np.isfinite(backward), backward, 0.0)
        self.backward *= np.asarray(self.has_backward)
        lowest = np.minimum.reduce(list(both.values()))
        self.each = np.where(np.isfinite(lowest), lowest, 0.0)
        # A device of this kind does at most ``speed`` seconds of best-device work in a second.
        self.capacity, self.slowest = 0.0, 1.0
        for kind, best in both.items():
            real = (lowest > 0) & np.isfinite(lowest)
            speed = float((lowest[real] / best[real]).max()) if real.any() else 1.0
            devices = sum(device.kind == kind for device in self.cluster.devices)
            self.capacity += devices * speed
            self.slowest = min(self.slowest, speed)
        self.times = self._unit_times(sizes, tables)

    def _unit_times(self, sizes: list[int], tables: dict[str, FloatArray]) -> UnitTimes:
        """What the price of a sample's way is made of; tables are [sizes, 2, units] by kind."""
        least = np.minimum.reduce(list(tables.values()))
        least[:, 1] = np.where(self.has_backward, least[:, 1], 0.0)
        capacity = 0.0
        for kind, table in tables.items():
            mine = table.sum(axis=1)
            real = (mine > 0) & np.isfinite(mine)
            ratio = least.sum(axis=1)[real] / mine[real]
            devices = sum(device.kind == kind for device in self.cluster.devices)
            capacity += devices * (float(ratio.max()) if ratio.size else 1.0)
        return UnitTimes(np.array(sizes, dtype=np.float64), least[:, 0], least[:, 1], capacity)

    def _measure_parameters(self) -> None:
        trained = {
            p.name: float(p.nbytes)
            for p in self.graph.parameters
            if p.trainable and not p.is_buffer
        }
        kinds = [self.costs.device_costs(kind) for kind in self.cluster.kinds]
        rate = min(item.optimizer_seconds_per_byte for item in kinds)
        each = min(item.optimizer_seconds_per_tensor for item in kinds)
        counts = np.zeros(len(self.units))
        self.parameter_bytes = np.zeros(len(self.units))
        used: set[str] = set()
        for u, unit in enumerate(self.units):
            names = {name for op in unit for name in self.graph.ops[op].parameters}
            used |= names
            self.parameter_bytes[u] = sum(trained.get(name, 0.0) for name in names)
            counts[u] = sum(name in trained for name in names)
        steps = self.parameter_bytes * rate + counts * each
        self.optimizer = np.maximum(0.0, steps - 2 * _HALF_NS)
        sizes = [size for name, size in trained.items() if name in used]
        self.optimizer_total = max(0.0, sum(sizes) * rate + len(sizes) * each - 2 * _HALF_NS)

    def _walk(self) -> None:
        """Releases and tails of forwards and backwards, for one sample at its best."""
        count = len(self.units)
        self.release_f, self.tail_b = np.zeros(count), np.zeros(count)
        for u in range(count):
            for v in self.predecessors[u]:
                self.release_f[u] = max(self.release_f[u], self.release_f[v] + self.forward[v])
        for u in range(count):
            for v in self.gradient_to[u]:
                self.tail_b[u] = max(self.tail_b[u], self.tail_b[v] + self.backward[v])
        self.tail_f = np.where(self.has_backward, self.backward + self.tail_b, 0.0)
        self.release_b = self.release_f + self.forward
        for u in reversed(range(count)):
            for v in self.predecessors[u]:
                self.tail_f[v] = max(self.tail_f[v], self.forward[u] + self.tail_f[u])
            for v in self.gradient_to[u]:
                self.release_b[v] = max(self.release_b[v], self.release_b[u] + self.backward[u])

    def solve(self) -> LowerBound:
        ideal = float(self.each.sum()) * self.batch
        work = (ideal + self.slowest * self.optimizer_total) / self.capacity
        indivisible, unit, devices = self._indivisible()
        parts = {
            "work": work,
            "fill_drain": self._fill_drain(),
            "indivisible": indivisible,
            "packing": self._packing(),
            "way": way_bound(
                self.times,
                self.batch,
                self.slowest * self.optimizer_total,
                self.predecessors,
                self.gradient_to,
            ),
        }
        rounding = (len(self.units) + 1) * 4 * _HALF_NS
        return LowerBound(
            seconds=max(0.0, max(parts.values()) - rounding),
            indivisible_ops=tuple(self.graph.ops[op].name for op in self.units[unit]),
            indivisible_devices=devices,
            ideal_work=ideal,
            capacity=self.capacity,
            **parts,
        )

    def _fill_drain(self) -> float:
        """The largest r + q + work(release >= r, tail >= q) / N."""
        # Each direction at its own best size, which e_u, at one size for both, never is below.
        forward, backward = self.forward, self.backward
        release = np.concatenate([self.release_f, self.release_b])
        tail = np.concatenate([self.tail_f, self.tail_b])
        work = np.concatenate([forward, backward]) * self.batch
        keep = work > 0
        release, tail, work = release[keep], tail[keep], work[keep]
        if not len(work):
            return 0.0
        order = np.argsort(-tail, kind="stable")
        release, tail, work = release[order], tail[order], work[order]
        levels = np.unique(release)
        if len(levels) > _THRESHOLDS:
            levels = levels[np.linspace(0, len(levels) - 1, _THRESHOLDS).astype(np.intp)]
        best = 0.0
        for level in levels:
            inside = release >= level
            value = level + tail + np.cumsum(np.where(inside, work, 0.0)) / self.capacity
            best = max(best, float(value[inside].max()))
        return best

    def _replicated(self) -> FloatArray:
        """[p - 1, units]: the bound of each unit if p devices hold it, p = 1 ... devices."""
        count = min(self.cluster.world_size, self.batch)
        holders = np.arange(1, count + 1)[:, None]
        tail = np.where(self.has_backward, self.tail_b, self.tail_f)
        after = self._all_reduce(count) + np.where(self.has_backward, self.optimizer, 0.0)
        share = self.batch * self.each[None, :] / holders
        return np.asarray(self.release_f + share + np.maximum(tail, after))

    def _all_reduce(self, count: int) -> FloatArray:
        """[p - 1, units]: least time of the all-reduce over p devices."""
        rows = np.zeros((count, len(self.units)))
        for p in range(2, count + 1):
            ways = all_reduce_ways(self.cluster, p)
            row = np.minimum.reduce([self.parameter_bytes * each + fixed for each, fixed in ways])
            rows[p - 1] = np.where(self.parameter_bytes > 0, np.maximum(0.0, row - _HALF_NS), 0.0)
        return rows

    def _indivisible(self) -> tuple[float, int, int]:
        table = self._replicated()
        best = table.min(axis=0)
        unit = int(best.argmax())
        return float(best[unit]), unit, int(table[:, unit].argmin()) + 1

    def _packing(self) -> float:
        """The least time at which single units do not overfill the devices, by bisection."""
        table = self._replicated()
        single = self.each * self.batch
        shared = table[1:].min(axis=0) if len(table) > 1 else np.full(len(single), np.inf)
        devices = self.cluster.world_size
        low, high = 0.0, float(single.sum())
        for _ in range(60):
            middle = (low + high) / 2
            if _overfull(np.sort(single[shared > middle])[::-1], devices) > middle:
                low = middle
            else:
                high = middle
        return low


def all_reduce_ways(cluster: Cluster, count: int) -> list[tuple[float, float]]:
    """Least costs of :meth:`Cluster.all_reduce_seconds` over any ``count`` ranks.

    Returns:
        (seconds per byte, seconds) of a ring within the node with the fastest links, of a ring
        across nodes, and of the hierarchical algorithm for every number of ranks per node. No
        choice of ranks is faster than the fastest of these.
    """
    net = cluster.network
    links = [cluster.node_link(node) for node in range(len(cluster.nodes))]
    inner = 0.0 if any(b is None for _, b in links) else 1 / max(b for _, b in links if b)
    inner_latency = min(latency for latency, _ in links)
    outer = 0.0 if net.inter_node_bandwidth is None else 1 / net.inter_node_bandwidth
    largest = max(len(node) for node in cluster.nodes)
    cards = -(-largest // net.devices_per_nic)
    around = 2.0 * (count - 1) / count
    steps = 2 * (count - 1)
    ways = []
    if count <= largest:
        ways.append((around * inner, steps * inner_latency))
    if len(cluster.nodes) > 1:
        ways.append((around * outer, steps * net.inter_node_latency))
        nodes = max(2, -(-count // largest))
        for each in range(2, min(largest, count // nodes) + 1):
            inside = 2.0 * (each - 1) / each * inner
            shared = -(-each // cards)
            across = 2.0 * (nodes - 1) / nodes * shared / each * outer
            fixed = 2 * (each - 1) * inner_latency + 2 * (nodes - 1) * net.inter_node_latency
            ways.append((inside + across, fixed))
    return ways


def _overfull(sizes: FloatArray, devices: int) -> float:
    """A bound on the fullest of ``devices`` bins; ``sizes`` descend."""
    best = 0.0
    for k in range(len(sizes) // devices + 1):
        last = k * devices
        if last < len(sizes):
            best = max(best, float(sizes[last - k : last + 1].sum()))
    return best


@dataclass(frozen=True)
class Gap:
    """Where the time of a plan above the bound goes: seconds, averages over all devices.

    ``efficiency + recompute + all_reduce + optimizer + imbalance + bubble`` is the iteration
    time less the ideal work per device; less ``bound_over_work``, which the bound explains, it
    is ``total``.

    Attributes:
        total: Iteration time less the bound.
        efficiency: Micro-batches smaller than the best size of each op, slower devices.
        recompute: Forwards run again.
        all_reduce: Reduction of gradients.
        optimizer: Optimizer steps.
        imbalance: Work of the busiest device above the average (idle devices count).
        bubble: Time that the busiest device waits: fill, drain, communication.
        bound_over_work: What the bound holds beyond the ideal work per device.
    """

    total: float
    efficiency: float
    recompute: float
    all_reduce: float
    optimizer: float
    imbalance: float
    bubble: float
    bound_over_work: float


def explain_gap(
    bound: LowerBound,
    iteration_seconds: float,
    compute_seconds: Sequence[float],
    *,
    recompute_seconds: float = 0.0,
    all_reduce_seconds: Sequence[float] = (),
    optimizer_seconds: Sequence[float] = (),
) -> Gap:
    """Decomposes the distance of a plan from the bound.

    Args:
        bound: The bound of the plan's input.
        iteration_seconds: Of the plan.
        compute_seconds: Forward and backward time of each device of the cluster, idle devices
            included; recomputation is part of it.
        recompute_seconds: Sum of the recomputation over all devices.
        all_reduce_seconds: Of each device; empty: none.
        optimizer_seconds: Of each device; empty: none.
    """
    count = len(compute_seconds)
    reduce = np.asarray(all_reduce_seconds if len(all_reduce_seconds) else np.zeros(count))
    update = np.asarray(optimizer_seconds if len(optimizer_seconds) else np.zeros(count))
    busy = np.asarray(compute_seconds) + reduce + update
    ideal = bound.ideal_work / count
    recompute = recompute_seconds / count
    return Gap(
        total=iteration_seconds - bound.seconds,
        efficiency=float(np.sum(compute_seconds)) / count - recompute - ideal,
        recompute=recompute,
        all_reduce=float(reduce.mean()),
        optimizer=float(update.mean()),
        imbalance=float(busy.max() - busy.mean()),
        bubble=iteration_seconds - float(busy.max()),
        bound_over_work=bound.seconds - ideal,
    )


def plan_gap(plan: Plan, bound: LowerBound) -> Gap:
    """Simulates a plan and decomposes its distance from the bound of its input."""
    timeline = simulate(plan)
    spent = {kind: [0] * plan.world_size for kind in ("F", "B", "all_reduce", "optimizer")}
    again = 0
    for event in timeline.events:
        spent[event.kind][event.rank] += event.end_ns - event.start_ns
        # A backward of a stage that recomputes is as much longer as its forward takes.
        if event.kind == "F" and plan.stages[event.stage].recompute:
            again += event.end_ns - event.start_ns
    return explain_gap(
        bound,
        timeline.iteration_ns / 1e9,
        [(f + b) / 1e9 for f, b in zip(spent["F"], spent["B"], strict=True)],
        recompute_seconds=again / 1e9,
        all_reduce_seconds=[item / 1e9 for item in spent["all_reduce"]],
        optimizer_seconds=[item / 1e9 for item in spent["optimizer"]],
    )
