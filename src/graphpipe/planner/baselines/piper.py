"""Piper: pipeline, data and tensor parallelism and recomputation, by dynamic programming.

Tarnawski et al., "Piper: Multidimensional Planner for DNN Parallelization", NeurIPS 2021,
with the constants of the authors' program:

* a stage is the difference of two sets closed under successors, found from the sinks up;
* a stage on d replicas of t devices takes, per micro-batch, the sum over its nodes of
  seconds / d, plus 2 x the bytes over its edges to other stages / d / bandwidth, plus
  4 (d - 1) / d x parameters / micro-batches / bandwidth; the slowest stage counts;
* its memory per device is A y + B with y = ceil(replicas of this and all later stages / d)
  micro-batches in flight, also where the later stages lie in parallel branches;
* each node runs in one of at most two configurations for its t (plain, or recomputing its
  activations): the fastest everywhere if that fits; otherwise nodes are switched in the
  order of seconds lost per byte saved until it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from graphpipe.errors import CostError, InfeasibleError
from graphpipe.planner.baselines.downsets import (
    DOWN_SET_LIMIT,
    DownSets,
    FloatArray,
    IntArray,
    enumerate_down_sets,
)

_TIE = 1e-9
"""Seconds or bytes below which the authors' program sees no difference."""


@dataclass(frozen=True, eq=False)
class Configurations:
    """How every node may run on ``t`` devices.

    Arrays are [nodes, configurations] with one or two configurations; nodes that cannot run
    on t devices have NaN in ``seconds``. ``extra_in`` and ``extra_out`` ([edges]) are bytes
    of tensor-parallel traffic that cutting the edge adds at its target and at its source.
    """

    seconds: FloatArray
    parameter_bytes: FloatArray
    memory_a: FloatArray
    memory_b: FloatArray
    extra_in: FloatArray
    extra_out: FloatArray


@dataclass(frozen=True, eq=False)
class PiperInput:
    """A graph with costs for Piper. Keys of ``configurations`` are tensor-parallel degrees.

    Attributes:
        nodes: Number of nodes.
        edges: (source, target) pairs.
        edge_bytes: [edges] bytes per micro-batch.
        configurations: By degree.
        memory_bytes: Of one device.
        bandwidth: Bytes per second, of one device to the outside.
        micro_batches: In a mini-batch.
    """

    nodes: int
    edges: tuple[tuple[int, int], ...]
    edge_bytes: FloatArray
    configurations: Mapping[int, Configurations]
    memory_bytes: float
    bandwidth: float
    micro_batches: int


@dataclass(frozen=True)
class PiperStage:
    """Nodes on ``replicas`` groups of ``tensor_parallel`` devices; ``configuration`` holds
    the chosen configuration of each node, 0 being the first of the input."""

    nodes: tuple[int, ...]
    replicas: int
    tensor_parallel: int
    configuration: tuple[int, ...]


@dataclass(frozen=True)
class PiperResult:
    """Seconds of the slowest stage per micro-batch, stages in topological order, set count."""

    seconds: float
    stages: tuple[PiperStage, ...]
    down_sets: int


def optimise(
    problem: PiperInput,
    devices: int,
    *,
    limit: int = DOWN_SET_LIMIT,
    sets: DownSets | None = None,
    check: Callable[[], None] = lambda: None,
) -> PiperResult:
    """The split with the fastest slowest stage on at most ``devices`` devices.

    Args:
        problem: Graph and costs.
        devices: How many there are.
        limit: Refuse graphs with more down-sets.
        sets: Down-sets of the graph with all edges reversed, if they are known already.
        check: Called now and then; may raise to stop the search.

    Raises:
        DownSetLimitError: if the graph has more down-sets than ``limit``.
        CostError: if cutting an edge costs different bytes in a node's two configurations.
        InfeasibleError: if nothing fits into the memory.
    """
    reverse = [(target, source) for source, target in problem.edges]
    up_sets = sets or enumerate_down_sets(problem.nodes, reverse, limit=limit)
    return _Programme(problem, devices, up_sets).solve(check)


class _Move:
    """A stage of d replicas on t devices each: its cost for every start, as set functions."""

    def __init__(self, problem: PiperInput, sets: DownSets, t: int, d: int, bound: int) -> None:
        self.t, self.d = t, d
        self.bandwidth = problem.bandwidth
        self.limit = problem.memory_bytes
        self.chosen = problem.configurations[t]
        costs = self.chosen
        resync = 4 * (d - 1) * costs.parameter_bytes / d / problem.micro_batches
        load = np.nan_to_num(costs.seconds) / d + resync / problem.bandwidth
        rows = np.arange(problem.nodes)
        fast = load.argmin(axis=1)
        self.fast = fast
        self.other = (load.shape[1] - 1 - fast) if load.shape[1] > 1 else fast
        self.load = load
        a, b = costs.memory_a, costs.memory_b
        self.fast_load = sets.sums(load[rows, fast])
        self.fast_a = sets.sums(a[rows, fast])
        self.fast_b = sets.sums(b[rows, fast])
        self.loss = load[rows, self.other] - load[rows, fast]
        self.saving_a = a[rows, fast] - a[rows, self.other]
        self.saving_b = b[rows, fast] - b[rows, self.other]
        self.sets = sets
        self.bound = bound
        # Bytes that switching every node that gains would save, [y, sets].
        steps = np.arange(-(-bound // d) + 1)[:, None]
        gains = self.saving_a * steps + self.saving_b
        self.savings = np.where(gains > _TIE, gains, 0.0) @ sets.members.T
        self._switches: dict[int, tuple[IntArray, FloatArray, FloatArray]] = {}

    def switches(self, y: int) -> tuple[IntArray, FloatArray, FloatArray]:
        """For y micro-batches in flight: the nodes that save memory, cheapest byte first, and
        cumulative savings and losses over them, each [nodes + 1, sets]."""
        if y not in self._switches:
            saving = self.saving_a * y + self.saving_b
            useful = np.flatnonzero(saving > _TIE)
            price = self.loss[useful] / saving[useful]
            order = useful[np.lexsort((useful, price))]
            members = self.sets.members[:, order]
            saved = np.zeros((len(order) + 1, len(self.sets)))
            lost = np.zeros_like(saved)
            np.cumsum((members * saving[order]).T, axis=0, out=saved[1:])
            np.cumsum((members * self.loss[order]).T, axis=0, out=lost[1:])
            self._switches[y] = (order, saved, lost)
        return self._switches[y]

    def seconds(self, end: int, starts: IntArray, cut_bytes: FloatArray) -> FloatArray:
        """[y = 0 ... largest, starts]: seconds of the stages, inf where they do not fit."""
        plain = self.fast_load[end] - self.fast_load[starts]
        plain = plain + cut_bytes / (self.d * self.bandwidth)
        a = self.fast_a[end] - self.fast_a[starts]
        b = self.fast_b[end] - self.fast_b[starts]
        top = -(-self.bound // self.d)
        table = np.broadcast_to(plain, (top + 1, len(starts)))
        if float((a * top + b).max()) <= self.limit:
            return table
        need = a * np.arange(top + 1)[:, None] + b - self.limit
        tight = need > 0
        most = self.savings[:, end, None] - self.savings[:, starts]
        table = np.where(tight & (most < need), np.inf, table)
        tight &= most >= need
        for y in np.flatnonzero(tight[1:].any(axis=1)) + 1:
            columns = np.flatnonzero(tight[y])
            _, saved, lost = self.switches(int(y))
            rows = starts[columns]
            missing = need[y, columns] - _TIE
            low = np.zeros(len(columns), dtype=np.intp)
            step = 1 << (len(saved) - 1).bit_length()
            # The first prefix of the switches that saves enough, by bisection.
            while step:
                middle = np.minimum(low + step, len(saved)) - 1
                short = saved[middle, end] - saved[middle, rows] <= missing
                low = np.where(short, middle + 1, low)
                step >>= 1
            low = np.minimum(low, len(saved) - 1)
            table[y, columns] += lost[low, end] - lost[low, rows]
        return table

    def configuration(self, nodes: Sequence[int], start: int, end: int, y: int) -> tuple[int, ...]:
        """The configuration of each node in the stage with y micro-batches in flight."""
        need = (self.fast_a[end] - self.fast_a[start]) * y
        need += self.fast_b[end] - self.fast_b[start] - self.limit
        switched: set[int] = set()
        if need > 0:
            order, saved, _ = self.switches(y)
            gained = saved[:, end] - saved[:, start]
            first = int(np.argmax(gained > need - _TIE))
            switched = {int(node) for node in order[:first]}
        return tuple(
            int(self.other[node] if node in switched else self.fast[node]) for node in nodes
        )


class _Programme:
    def __init__(self, problem: PiperInput, devices: int, sets: DownSets) -> None:
        self.problem = problem
        self.devices = devices
        self.sets = sets
        self.bound = min(problem.micro_batches, devices)
        self.moves: list[_Move] = []
        self.missing: dict[int, FloatArray] = {}
        for t in sorted(problem.configurations):
            if t > devices:
                continue
            costs = problem.configurations[t]
            self.missing[t] = sets.sums(np.isnan(costs.seconds).any(axis=1).astype(np.float64))
            self.moves.extend(
                _Move(problem, sets, t, d, self.bound)
                for d in range(1, min(devices // t, self.bound) + 1)
                if problem.micro_batches % d == 0
            )
        # With t = 1 alone the sum of the replicas is the number of devices: one index less.
        self.one_dimension = {move.t for move in self.moves} == {1}
        if self.one_dimension:
            self.devices = self.bound
        self._prepare_cuts()

    def _prepare_cuts(self) -> None:
        edges = np.asarray(self.problem.edges, dtype=np.intp).reshape(-1, 2)
        self.sources, self.targets = edges[:, 0], edges[:, 1]
        members = self.sets.members
        # Sets are closed under successors: an edge is cut if its target alone is inside.
        crossing = members[:, self.targets] * (1.0 - members[:, self.sources])
        self.crossing = crossing > 0.5
        self.inward: dict[int, FloatArray] = {}
        self.outward: dict[int, FloatArray] = {}
        for t in self.missing:
            costs = self.problem.configurations[t]
            self.inward[t] = 2 * (self.problem.edge_bytes + costs.extra_in)
            self.outward[t] = 2 * (self.problem.edge_bytes + costs.extra_out)

    def cut_bytes(self, t: int, end: int, starts: IntArray) -> FloatArray:
        """Bytes over the edges between the stage (``end`` minus each start) and the others.

        An edge into the stage has its target in the stage and its source outside ``end``;
        an edge out of it has its source in the stage and its target in the start.
        """
        into_end = self.crossing[end]
        inward = self.inward[t] * into_end
        members = self.sets.members
        # Edges into ``end`` whose target lies in the start are none of this stage's.
        into = inward.sum() - _edge_sum(members, starts, self.targets, inward)
        if t not in self._out_of_start:
            self._out_of_start[t] = np.asarray(self.crossing @ self.outward[t])
        # Edges into the start whose source lies outside ``end`` do not touch the stage.
        foreign = _edge_sum(members, starts, self.targets, self.outward[t] * into_end)
        return np.asarray(into + self._out_of_start[t][starts] - foreign)

    def solve(self, check: Callable[[], None]) -> PiperResult:
        self._out_of_start: dict[int, FloatArray] = {}
        sets, devices = self.sets, self.devices
        width = 1 if self.one_dimension else self.bound + 1
        best = np.full((devices + 1, width, len(sets)), np.inf)
        best[0, 0, 0] = 0.0
        self.best = best
        for end in range(1, len(sets)):
            check()
            starts = sets.below(end)
            before = best[:, :, starts]
            column = np.full((devices + 1, width), np.inf)
            cuts: dict[int, tuple[FloatArray, np.ndarray]] = {}
            for move in self.moves:
                if move.t not in cuts:
                    whole = self.missing[move.t][end] - self.missing[move.t][starts] < 0.5
                    cuts[move.t] = (self.cut_bytes(move.t, end, starts), whole)
                bytes_cut, whole = cuts[move.t]
                if not whole.any():
                    continue
                table = move.seconds(end, starts, bytes_cut)
                if not whole.all():
                    table = np.where(whole, table, np.inf)
                self._apply(move, before, table, column)
            best[:, :, end] = column
        return self._result()

    def _apply(self, move: _Move, before: FloatArray, table: FloatArray, out: FloatArray) -> None:
        used = move.t * move.d
        if self.one_dimension:
            totals = np.arange(used, self.devices + 1)
            flights = -(-totals // move.d)
            seconds = table[flights] if not _is_broadcast(table) else table[:1]
            slowest = np.maximum(before[: self.devices + 1 - used, 0], seconds).min(axis=1)
            np.minimum(out[used:, 0], slowest, out=out[used:, 0])
            return
        totals = np.arange(move.d, self.bound + 1)
        seconds = table[-(-totals // move.d)]
        earlier = before[: self.devices + 1 - used, : self.bound + 1 - move.d]
        slowest = np.maximum(earlier, seconds[None]).min(axis=2)
        np.minimum(out[used:, move.d :], slowest, out=out[used:, move.d :])

    def _result(self) -> PiperResult:
        final = self.best[:, :, -1]
        lowest = float(final.min())
        if not np.isfinite(lowest):
            raise InfeasibleError(
                "Piper finds no partition that fits into the memory",
                expected=f"stages of at most {self.problem.memory_bytes:.6g} bytes per device",
                fix="Give more devices or memory, or a smaller micro-batch",
            )
        used, total = (int(i) for i in np.argwhere(final <= lowest + _TIE)[0])
        seconds = float(final[used, total])
        stages: list[PiperStage] = []
        end = len(self.sets) - 1
        while end != 0:
            move, start, y = self._witness(end, used, total)
            nodes = self.sets.nodes_between(start, end)
            chosen = move.configuration(nodes, start, end, y)
            stages.append(PiperStage(nodes, move.d, move.t, chosen))
            end, used = start, used - move.t * move.d
            total = 0 if self.one_dimension else total - move.d
        return PiperResult(seconds, tuple(stages), len(self.sets))

    def _witness(self, end: int, used: int, total: int) -> tuple[_Move, int, int]:
        """The first move and start that give the table's value: (move, start, in flight)."""
        starts = self.sets.below(end)
        target = self.best[used, total, end]
        for move in self.moves:
            replicas = used if self.one_dimension else total
            if move.t * move.d > used or move.d > replicas:
                continue
            whole = self.missing[move.t][end] - self.missing[move.t][starts] < 0.5
            table = move.seconds(end, starts, self.cut_bytes(move.t, end, starts))
            y = -(-replicas // move.d)
            rest = 0 if self.one_dimension else total - move.d
            earlier = self.best[used - move.t * move.d, rest, starts]
            slowest = np.where(whole, np.maximum(earlier, table[y]), np.inf)
            hits = np.flatnonzero(slowest == target)
            if len(hits):
                return move, int(starts[hits[0]]), y
        raise AssertionError("the table names a value that no stage attains")


def _is_broadcast(table: FloatArray) -> bool:
    return table.strides[0] == 0


def _edge_sum(
    members: FloatArray, rows: IntArray, ends: IntArray, weights: FloatArray
) -> FloatArray:
    """For each set in ``rows``: the sum of weights of the edges whose end is a member."""
    used = np.flatnonzero(weights)
    if not len(used):
        return np.zeros(len(rows))
    columns, inverse = np.unique(ends[used], return_inverse=True)
    total = np.bincount(inverse, weights=weights[used])
    return np.asarray(members[np.ix_(rows, columns)] @ total)


def configurations_from_arrays(
    seconds: FloatArray,
    parameter_bytes: FloatArray,
    memory_a: FloatArray,
    memory_b: FloatArray,
    extra_in: Sequence[FloatArray],
    extra_out: Sequence[FloatArray],
) -> Configurations:
    """Checks and packs the configurations of one degree; ``extra_*`` hold one array of
    [edges] for each configuration.

    Raises:
        CostError: if the configurations differ in what cutting an edge costs.
    """
    for arrays in (extra_in, extra_out):
        if any(not np.array_equal(array, arrays[0]) for array in arrays):
            raise CostError(
                "Two configurations of a node differ in the traffic of a cut edge",
                expected="equal tensor-parallel traffic with and without recomputation",
            )
    if seconds.shape[1] > 2:
        raise CostError(
            "A node has more than two configurations for one tensor-parallel degree",
            expected="at most two",
            got=str(seconds.shape[1]),
        )
    return Configurations(seconds, parameter_bytes, memory_a, memory_b, extra_in[0], extra_out[0])
