"""GraphPipe's stage partitioner as published.

Jeon et al., "GraphPipe: Improving Performance and Scalability of DNN Training with Graph
Pipeline Parallelism", ASPLOS 2025, section 5: the graph is decomposed in series and in
parallel; a bisection finds the smallest bottleneck (time per sample of the slowest stage)
for which a dynamic programme over the decomposition, from the sink upward, finds stages
that fit into the devices and their memory. The programme carries the samples in flight, so
that memory is judged exactly where branches are independent. Each stage has a micro-batch
size of its own; its devices are its own too; nothing is recomputed and nothing is refined.

The paper splits the devices between the parts of a series or of a parallel and tries all
splits. Here the programme minimises the devices of each part instead, keeping what is not
dominated in (devices, samples in flight); the devices of parts add up, and the plans that
are reached are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graphpipe.errors import InfeasibleError
from graphpipe.graph.series_parallel import Leaf, Parallel, Series, Tree, decompose, leaves
from graphpipe.planner.unit_graph import UnitGraph

_STEPS = 20
"""Halvings of the bisection: a bottleneck within a millionth of the smallest."""
_SIZES = 3
"""Micro-batch sizes that each stage may choose from: the largest and its halves."""


class PaperStage(NamedTuple):
    """Units on ``replicas`` devices of their own, ``micro_batch`` samples a task."""

    units: tuple[int, ...]
    replicas: int
    micro_batch: int


@dataclass(frozen=True)
class PaperResult:
    """Seconds per sample of the slowest stage, and the stages, producers first."""

    seconds_per_sample: float
    stages: tuple[PaperStage, ...]


class _Below(NamedTuple):
    """What a part sees of the stages that read it: the most samples in flight, the largest
    quantum (0, 0 where nothing reads it)."""

    in_flight: int
    quantum: int


class _Choice(NamedTuple):
    """A way to run a part: devices, what the stages above it will see, and its stages."""

    devices: int
    above: _Below
    stages: _Stages | None


class _Stages(NamedTuple):
    """A list of stages that shares its tails."""

    first: PaperStage | None
    left: _Stages | None
    right: _Stages | None


def optimise(
    units: UnitGraph,
    kind: str,
    devices: int,
    *,
    batch_size: int,
    largest_micro_batch: int,
    memory_bytes: float,
    bandwidth: float | None,
    check: Callable[[], None] = lambda: None,
) -> PaperResult:
    """The stages with the smallest bottleneck.

    Args:
        units: The graph.
        kind: Kind of the devices.
        devices: How many.
        batch_size: B, samples.
        largest_micro_batch: No stage takes more samples at a time.
        memory_bytes: Of one device.
        bandwidth: Bytes per second of the reduction of gradients; None: it takes no time.
        check: Called now and then; may raise to stop the search.

    Raises:
        InfeasibleError: if no stages fit into the devices and their memory.
    """
    programme = _Programme(
        units, kind, devices, batch_size, largest_micro_batch, memory_bytes, bandwidth, check
    )
    high = programme.longest * (1 + 1e-9)  # sums in another order differ in the last bits
    found = programme.solve(high)
    if found is None:
        raise InfeasibleError(
            "GraphPipe's partitioner finds no stages that fit into the memory",
            expected=f"at most {memory_bytes:.6g} bytes on each of {devices} devices",
            fix="Give more devices or memory, or a smaller micro-batch",
        )
    low = 0.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        choice = programme.solve(middle)
        if choice is None:
            low = middle
        else:
            high, found = middle, choice
    stages = tuple(sorted(_flatten(found.stages), key=lambda stage: stage.units[0]))
    return PaperResult(max(programme.per_sample(stage) for stage in stages), stages)


class _Programme:
    def __init__(
        self,
        units: UnitGraph,
        kind: str,
        devices: int,
        batch_size: int,
        largest: int,
        memory_bytes: float,
        bandwidth: float | None,
        check: Callable[[], None],
    ) -> None:
        self.check = check
        self.units, self.devices = units, devices
        self.batch_size, self.memory_bytes, self.bandwidth = batch_size, memory_bytes, bandwidth
        self.sizes = [largest >> i for i in range(_SIZES) if largest >> i >= 1]
        self.work = {}
        for size in self.sizes:
            forward, backward = units.times(kind, size)
            self.work[size] = [(f + w) / 1e9 / size for f, w in zip(forward, backward, strict=True)]
        self.tree = decompose(units.predecessors, self.work[self.sizes[0]])
        self.longest = max(sum(work) for work in self.work.values()) + self._reduce(
            tuple(range(len(units))), devices
        )
        self._leaves: dict[int, tuple[int, ...]] = {}

    def per_sample(self, stage: PaperStage) -> float:
        """Seconds per sample of a stage, its share of the gradients' reduction included."""
        work = self.work[stage.micro_batch]
        compute = sum(work[u] for u in stage.units) / stage.replicas
        return compute + self._reduce(stage.units, stage.replicas)

    def _reduce(self, units: tuple[int, ...], replicas: int) -> float:
        if replicas < 2 or self.bandwidth is None:
            return 0.0
        volume = 2.0 * (replicas - 1) / replicas * self.units.facts(units).gradient
        return volume / self.bandwidth / self.batch_size

    def solve(self, bottleneck: float) -> _Choice | None:
        """The way with the fewest devices, then the fewest samples in flight; None: there is
        none within the devices."""
        self._bottleneck = bottleneck
        self._memo: dict[tuple[int, _Below], list[_Choice]] = {}
        self._stage_memo: dict[tuple[tuple[int, ...], _Below], list[_Choice]] = {}
        choices = self._part(self.tree, _Below(0, 0))
        return min(choices, key=lambda c: (c.devices, c.above), default=None)

    def _part(self, tree: Tree, below: _Below) -> list[_Choice]:
        self.check()
        key = (id(tree), below)
        if key not in self._memo:
            if isinstance(tree, Leaf):
                found = self._stage((tree.node,), below)
            elif isinstance(tree, Series):
                found = self._series(tree, below)
            else:
                found = self._parallel(tree, below)
            self._memo[key] = found
        return self._memo[key]

    def _members(self, tree: Tree) -> tuple[int, ...]:
        key = id(tree)
        if key not in self._leaves:
            self._leaves[key] = leaves(tree)
        return self._leaves[key]

    def _union(self, trees: Sequence[Tree]) -> tuple[int, ...]:
        return tuple(sorted(u for tree in trees for u in self._members(tree)))

    def _least(self, units: tuple[int, ...]) -> float:
        """Seconds per sample of these units on one device, at the best size."""
        return min(sum(work[u] for u in units) for work in self.work.values())

    def _stage(self, units: tuple[int, ...], below: _Below) -> list[_Choice]:
        """One stage of these units: for each size the fewest replicas that meet the bottleneck
        and the memory."""
        key = (units, below)
        if key in self._stage_memo:
            return self._stage_memo[key]
        found: list[_Choice] = []
        facts = self.units.facts(units)
        for size in self.sizes:
            work = self.work[size]
            compute = sum(work[u] for u in units)
            for replicas in range(1, self.devices + 1):
                if compute / replicas > self._bottleneck or replicas * size > self.batch_size:
                    continue
                if compute / replicas + self._reduce(units, replicas) > self._bottleneck:
                    continue
                above = self._in_flight(size, replicas, below)
                held = -(-above.in_flight // (replicas * size))
                saved = facts.saved_fixed + facts.saved_bytes * size
                memory = facts.static + held * saved
                memory += facts.workspace_fixed + facts.workspace_bytes * size
                if memory <= self.memory_bytes:
                    stage = PaperStage(units, replicas, size)
                    found.append(_Choice(replicas, above, _Stages(stage, None, None)))
                    break
        self._stage_memo[key] = found = _undominated(found)
        return found

    def _in_flight(self, size: int, replicas: int, below: _Below) -> _Below:
        """The in-flight rule of kFkB for one stage above ``below``."""
        block = max(1, -(-below.quantum // (replicas * size)))
        quantum = replicas * size * block
        need = below.in_flight + quantum
        if below.quantum:
            need += max(0, size * block - below.quantum)
        rounded = -(-need // quantum) * quantum
        return _Below(min(self.batch_size, rounded), quantum)

    def _series(self, tree: Series, below: _Below) -> list[_Choice]:
        """Cuts between any two children; a part between cuts is one stage or, if it is a
        single child, whatever that child may be."""
        count = len(tree.children)
        # best[i]: ways to run the children from i on.
        best: list[list[_Choice]] = [[] for _ in range(count + 1)]
        best[count] = [_Choice(0, below, None)]
        for start in range(count - 1, -1, -1):
            found: list[_Choice] = []
            for stop in range(start + 1, count + 1):
                units = self._union(tree.children[start:stop])
                if stop > start + 1 and self._least(units) > self._bottleneck * self.devices:
                    break
                for after in best[stop]:
                    own = self._stage(units, after.above)
                    if stop == start + 1 and not isinstance(tree.children[start], Leaf):
                        own = own + self._part(tree.children[start], after.above)
                    for choice in own:
                        total = choice.devices + after.devices
                        if total <= self.devices:
                            stages = _Stages(None, choice.stages, after.stages)
                            found.append(_Choice(total, choice.above, stages))
            best[start] = _undominated(found)
        return best[0]

    def _parallel(self, tree: Parallel, below: _Below) -> list[_Choice]:
        """Neighbouring branches in one stage, or each branch by itself."""
        count = len(tree.children)
        nothing = _Choice(0, _Below(0, 0), None)
        best: list[list[_Choice]] = [[nothing]] + [[] for _ in range(count)]
        for stop in range(1, count + 1):
            found: list[_Choice] = []
            for start in range(stop - 1, -1, -1):
                own = self._stage(self._union(tree.children[start:stop]), below)
                if start == stop - 1:
                    own = own + self._part(tree.children[start], below)
                elif not own:
                    break
                for before in best[start]:
                    for choice in own:
                        total = before.devices + choice.devices
                        if total <= self.devices:
                            above = _Below(
                                max(before.above.in_flight, choice.above.in_flight),
                                max(before.above.quantum, choice.above.quantum),
                            )
                            stages = _Stages(None, before.stages, choice.stages)
                            found.append(_Choice(total, above, stages))
            best[stop] = _undominated(found)
        return best[count]


def _undominated(choices: Sequence[_Choice]) -> list[_Choice]:
    """Those that no other beats in devices, in-flight samples and quantum together."""
    kept: list[_Choice] = []
    for choice in sorted(choices, key=lambda c: (c.devices, c.above)):
        if not any(
            other.above.in_flight <= choice.above.in_flight
            and other.above.quantum <= choice.above.quantum
            for other in kept
        ):
            kept.append(choice)
    return kept


def _flatten(stages: _Stages | None) -> list[PaperStage]:
    found: list[PaperStage] = []
    pending = [stages]
    while pending:
        item = pending.pop()
        if item is None:
            continue
        if item.first is not None:
            found.append(item.first)
        pending += [item.left, item.right]
    return found
