"""PipeDream's optimiser: a chain of replicated stages with the fastest slowest stage.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP
2019, section 3.1, with the constants of the authors' program:

* states are the down-sets of the graph (the program's augmented antichains); a stage is
  the difference of two states, so branches are put into one chain;
* a stage of work C and parameters P on m machines takes (C + 4 (m - 1) P / (m bandwidth)) / m;
* the cost of sending activations between stages is left out (the program's default);
* machines come in levels: the best split of every range over the machines of one level is
  the work that the next level divides;
* the memory check of the program: ceil(machines after the stage / m) x (activations +
  parameters) of the stage.

Two things are different. A graph with several sources starts with all of them ready (the
program begins at its first source and drops what cannot be reached from it). And in the
lower levels a range is split only at states that contain its start; the program also
splits at states that do not, where the difference of two states has no meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from graphpipe.errors import InfeasibleError
from graphpipe.planner.baselines.downsets import (
    DownSetLimitError,
    DownSets,
    FloatArray,
    IntArray,
    enumerate_down_sets,
)

_FEW_MACHINES = 8
_TABLE_LIMIT_BYTES = 1 << 30
"""Tables over all ranges are refused above this size: the lower levels need them."""


@dataclass(frozen=True)
class Level:
    """One level of the machine hierarchy, innermost first.

    Attributes:
        machines: Machines (of the level below) that one unit of this level has.
        bandwidth: Bytes per second between them.
    """

    machines: int
    bandwidth: float


@dataclass(frozen=True, eq=False)
class NodeCosts:
    """What PipeDream knows of each node, as arrays of shape [nodes].

    Attributes:
        seconds: Forward and backward of one mini-batch (in our words: one micro-batch).
        parameter_bytes: Weights.
        activation_bytes: Output; counts in the memory check.
    """

    seconds: FloatArray
    parameter_bytes: FloatArray
    activation_bytes: FloatArray


@dataclass(frozen=True)
class ReplicatedStage:
    """Nodes that run together on ``replicas`` machines."""

    nodes: tuple[int, ...]
    replicas: int


@dataclass(frozen=True)
class PipeDreamResult:
    """The slowest stage's seconds per micro-batch, the stages in order, and the states."""

    seconds: float
    stages: tuple[ReplicatedStage, ...]
    states: int


def optimise(
    costs: NodeCosts,
    edges: Sequence[tuple[int, int]],
    levels: Sequence[Level],
    *,
    memory_bytes: float | None = None,
    straight: bool = False,
    synchronise_every: float = 1.0,
    down_sets: DownSets | None = None,
    check: Callable[[], None] = lambda: None,
) -> PipeDreamResult:
    """Splits the graph into a chain of replicated stages.

    Args:
        costs: Of each node.
        edges: (source, target) pairs of node numbers.
        levels: The machines, innermost level first. All machines are used.
        memory_bytes: Of one machine; None: no memory check.
        straight: No replication.
        synchronise_every: Micro-batches between two reductions of the gradients. The paper
            reduces after each (1); a synchronous schedule reduces once per mini-batch.
        down_sets: Of the graph, if they are known already.
        check: Called now and then; may raise to stop the search.

    Raises:
        DownSetLimitError: if the graph has too many states.
        InfeasibleError: if the memory check lets no split through.
    """
    sets = down_sets or enumerate_down_sets(len(costs.seconds), edges)
    search = _Search(
        sets,
        sets.sums(costs.parameter_bytes),
        sets.sums(costs.activation_bytes),
        memory_bytes,
        straight,
        synchronise_every,
        check,
    )
    base: _Base = _Prefix(sets.sums(costs.seconds))
    bases = [base]
    for number, level in enumerate(levels[:-1]):
        below = levels[number - 1].machines if number else 1
        bases.append(_Matrix(search.all_ranges(bases[-1], level, below)))
    below = levels[-2].machines if len(levels) > 1 else 1
    top = search.from_start(bases[-1], levels[-1], below, 0)
    best = float(top[levels[-1].machines, -1])
    if not np.isfinite(best):
        raise InfeasibleError(
            "PipeDream's memory check lets no partition through",
            expected=f"stages that keep at most {memory_bytes:.6g} bytes per machine",
            fix="Give more memory or more machines, or leave the check out",
        )
    stages = _stages(search, bases, levels, len(sets) - 1)
    return PipeDreamResult(best, stages, len(sets) - 1)


class _Prefix:
    """Work of a range as a difference of two cumulative sums."""

    def __init__(self, cumulative: FloatArray) -> None:
        self._cumulative = cumulative

    def column(self, starts: IntArray, end: int) -> FloatArray:
        return np.asarray(self._cumulative[end] - self._cumulative[starts])


class _Matrix:
    """Work of a range as the level below solved it."""

    def __init__(self, seconds: FloatArray) -> None:
        self._seconds = seconds

    def column(self, starts: IntArray, end: int) -> FloatArray:
        return np.asarray(self._seconds[starts, end])


_Base = _Prefix | _Matrix


class _Search:
    def __init__(
        self,
        sets: DownSets,
        parameters: FloatArray,
        activations: FloatArray,
        memory_bytes: float | None,
        straight: bool,
        synchronise_every: float,
        check: Callable[[], None],
    ) -> None:
        self.sets = sets
        self.parameters = parameters
        self.activations = activations
        self.memory_bytes = memory_bytes
        self.straight = straight
        self.synchronise_every = synchronise_every
        self.check = check

    def all_stage_seconds(
        self, base: _Base, level: Level, starts: IntArray, end: int, widest: int
    ) -> FloatArray:
        """[machines - 1, starts]: seconds of the stages from each of ``starts`` to ``end`` on
        1 to ``widest`` machines."""
        machines = np.arange(1, widest + 1)[:, None]
        parameters = self.parameters[end] - self.parameters[starts]
        reduce = 4 * (machines - 1) * parameters / (level.bandwidth * machines)
        reduce /= self.synchronise_every
        return np.asarray((base.column(starts, end) + reduce) / machines)

    def whole_seconds(
        self, base: _Base, level: Level, within: int, starts: IntArray, end: int, machines: int
    ) -> FloatArray:
        """The same where the stage is the whole range: its reduction is shared by the level
        below, as in the authors' program."""
        parameters = self.parameters[end] - self.parameters[starts]
        reduce = 4 * (machines - 1) * parameters / (level.bandwidth * machines)
        reduce /= within * self.synchronise_every
        return np.asarray((base.column(starts, end) + reduce) / machines)

    def too_big(
        self, level: Level, starts: IntArray, end: int, machines: int, used: int
    ) -> np.ndarray:
        """Where the stage from ``starts`` to ``end`` keeps more than a machine has, if it and
        all stages before it use ``used`` machines."""
        if self.memory_bytes is None:
            return np.zeros(len(starts), dtype=bool)
        kept = self.activations[end] - self.activations[starts]
        kept = kept + self.parameters[end] - self.parameters[starts]
        admitted = -(-(level.machines - used) // machines)
        return np.asarray(admitted * kept > self.memory_bytes)

    def from_start(self, base: _Base, level: Level, within: int, start: int) -> FloatArray:
        """[machines, ends]: best split of the ranges from set ``start`` to each larger one."""
        count, total = len(self.sets), level.machines
        best = np.full((total + 1, count), np.inf)
        best[0, start] = 0.0
        widest = 1 if self.straight else total
        for end in self.sets.above(start):
            self.check()
            starts = self.sets.between(start, int(end))
            seconds = self.all_stage_seconds(base, level, starts, int(end), widest)
            for machines in range(1, widest + 1):
                whole = self.whole_seconds(base, level, within, starts[:1], int(end), machines)
                seconds[machines - 1, 0] = whole[0]
            if self.memory_bytes is not None:
                best[:, end] = self._within_memory(level, best, seconds, starts, int(end))
            elif total <= _FEW_MACHINES:
                best[1:, end] = _combine_at_once(best[:, starts], seconds, total)
            else:
                best[1:, end] = _combine(best[:, starts], seconds, total)
        return best

    def _within_memory(
        self, level: Level, best: FloatArray, seconds: FloatArray, starts: IntArray, end: int
    ) -> FloatArray:
        """The same for one end, where each number of machines has its own memory check."""
        column = np.full(level.machines + 1, np.inf)
        for machines in range(1, len(seconds) + 1):
            last = seconds[machines - 1]
            for used in range(machines, level.machines + 1):
                big = self.too_big(level, starts, end, machines, used)
                slower = np.maximum(best[used - machines, starts], np.where(big, np.inf, last))
                column[used] = min(column[used], slower.min())
        return column

    def all_ranges(self, base: _Base, level: Level, within: int) -> FloatArray:
        """[starts, ends]: best split of every range over all machines of the level.

        Raises:
            DownSetLimitError: if there are too many ranges.
        """
        count = len(self.sets)
        if count * count * 8 > _TABLE_LIMIT_BYTES:
            raise DownSetLimitError(
                "The graph has too many down-sets for PipeDream with several machine levels",
                expected=f"a table of at most {_TABLE_LIMIT_BYTES} bytes",
                got=f"{count} down-sets",
                fix="Coarsen the graph first, for instance by fusing chains",
            )
        found = np.full((count, count), np.inf)
        for start in range(count):
            found[start] = self.from_start(base, level, within, start)[level.machines]
        return found


def _combine(before: FloatArray, seconds: FloatArray, total: int) -> FloatArray:
    """[used - 1]: the least, over all last stages, of the slower of it and what is before it."""
    column = np.full(total + 1, np.inf)
    for machines in range(1, len(seconds) + 1):
        slowest = np.maximum(before[: total + 1 - machines], seconds[machines - 1]).min(axis=1)
        np.minimum(column[machines:], slowest, out=column[machines:])
    return column[1:]


def _combine_at_once(before: FloatArray, seconds: FloatArray, total: int) -> FloatArray:
    """The same in few calls, for short arrays."""
    pairs = [(u, m) for u in range(1, total + 1) for m in range(1, min(u, len(seconds)) + 1)]
    earlier = [u - m for u, m in pairs]
    last = [m - 1 for _, m in pairs]
    slowest = np.maximum(before[earlier], seconds[last]).min(axis=1)
    firsts = [i for i, (u, m) in enumerate(pairs) if m == 1]
    return np.asarray(np.minimum.reduceat(slowest, firsts))


def _stages(
    search: _Search, bases: Sequence[_Base], levels: Sequence[Level], end: int
) -> tuple[ReplicatedStage, ...]:
    """Follows the splits back from the outermost level to the stages of the innermost."""
    ranges = [(0, end, 1)]
    for number in range(len(levels) - 1, -1, -1):
        inner: list[tuple[int, int, int]] = []
        within = levels[number - 1].machines if number else 1
        for start, stop, outer in ranges:
            split = _split(search, bases[number], levels[number], within, start, stop)
            inner.extend((low, high, outer * machines) for low, high, machines in split)
        ranges = inner
    return tuple(
        ReplicatedStage(search.sets.nodes_between(low, high), replicas)
        for low, high, replicas in ranges
    )


def _split(
    search: _Search, base: _Base, level: Level, within: int, start: int, stop: int
) -> list[tuple[int, int, int]]:
    """The stages (start, end, machines) of one range, in order.

    Of equally good last stages the one on the fewest machines is taken, then the longest.
    """
    best = search.from_start(base, level, within, start)
    found: list[tuple[int, int, int]] = []
    used, end = level.machines, stop
    while end != start:
        starts = search.sets.between(start, end)
        widest = 1 if search.straight else used
        seconds = search.all_stage_seconds(base, level, starts, end, widest)
        for machines in range(1, widest + 1):
            whole = search.whole_seconds(base, level, within, starts[:1], end, machines)
            last = seconds[machines - 1]
            last[0] = whole[0]
            big = search.too_big(level, starts, end, machines, used)
            slowest = np.maximum(best[used - machines, starts], np.where(big, np.inf, last))
            hits = np.flatnonzero(slowest == best[used, end])
            if len(hits):
                break
        else:
            raise AssertionError("the table names a value that no stage attains")
        low = int(starts[hits[0]])
        found.append((low, end, machines))
        used, end = used - machines, low
    return found[::-1]
