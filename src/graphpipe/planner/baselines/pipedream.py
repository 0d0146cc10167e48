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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graphpipe.errors import InfeasibleError
from graphpipe.planner.baselines.downsets import (
    DownSetLimitError,
    DownSets,
    FloatArray,
    IntArray,
    enumerate_down_sets,
)

_BLOCK = 1 << 12
"""Last stages that are looked at together: their tables stay in the cache."""
_BATCH_BYTES = 1 << 26
"""Of the tables for starts that are looked at together."""
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

    def of(self, starts: IntArray, ends: IntArray) -> FloatArray:
        return np.asarray(self._cumulative[ends] - self._cumulative[starts])


class _Matrix:
    """Work of a range as the level below solved it."""

    def __init__(self, seconds: FloatArray) -> None:
        self._seconds = seconds

    def of(self, starts: IntArray, ends: IntArray) -> FloatArray:
        return np.asarray(self._seconds[starts, ends])


_Base = _Prefix | _Matrix


class _Block(NamedTuple):
    """Last stages of some ranges that end at sets of one size.

    Attributes:
        starts: Where the ranges start.
        ends: Where they end, ascending for each start.
        first: Position in ``cuts`` of the first cut of each range.
        cuts: For each range, the sets at which its last stage may start, ascending.
        range_of: The range that each cut belongs to.
    """

    starts: IntArray
    ends: IntArray
    first: IntArray
    cuts: IntArray
    range_of: IntArray

    @property
    def stops(self) -> IntArray:
        """The end of the range of each cut."""
        return self.ends[self.range_of]


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

    def stage_seconds(self, base: _Base, level: Level, within: int, block: _Block) -> FloatArray:
        """[machines - 1, cuts]: seconds of the last stages on 1, 2 ... machines.

        Where a stage is its whole range, its reduction is shared by the level below (``within``
        machines), as in the authors' program.
        """
        machines = np.arange(1, (1 if self.straight else level.machines) + 1)[:, None]
        share = 4 * (machines - 1) / (level.bandwidth * machines * self.synchronise_every)
        stops = block.stops
        reduce = share * (self.parameters[stops] - self.parameters[block.cuts])
        if within > 1:
            whole = block.cuts == block.starts[block.range_of]
            reduce = np.where(whole, reduce / within, reduce)
        return np.asarray((base.of(block.cuts, stops) + reduce) / machines)

    def allowed(self, level: Level, seconds: FloatArray, block: _Block, used: int) -> FloatArray:
        """The seconds of last stages on 1, 2 ... ``used`` machines, inf where memory is short.

        It is short where a machine keeps more than it has, if the stage and all before it use
        ``used`` machines.
        """
        last = seconds[:used]
        if self.memory_bytes is None:
            return last
        stops = block.stops
        kept = self.activations[stops] - self.activations[block.cuts]
        kept = kept + self.parameters[stops] - self.parameters[block.cuts]
        admitted = -(-(level.machines - used) // np.arange(1, len(last) + 1)[:, None])
        return np.where(admitted * kept > self.memory_bytes, np.inf, last)

    def solve(
        self, base: _Base, level: Level, within: int, starts: IntArray, blocks: Iterable[_Block]
    ) -> FloatArray:
        """[machines, starts, ends]: best splits of the ranges from each of ``starts``.

        Args:
            base: Work of a range on one unit of the level.
            level: The machines to divide among stages.
            within: Machines of the level below.
            starts: Sets at which the ranges start, ascending.
            blocks: Their ranges, small ends first; their ``starts`` are positions in ``starts``.
        """
        count = level.machines
        best = np.full((count + 1, len(starts), len(self.sets)), np.inf)
        best[0, np.arange(len(starts)), starts] = 0.0
        for block in blocks:
            self.check()
            of_sets = block._replace(starts=starts[block.starts])
            seconds = self.stage_seconds(base, level, within, of_sets)
            before = best[:, block.starts[block.range_of], block.cuts]
            for used in range(1, count + 1):
                last = self.allowed(level, seconds, block, used)
                slowest = np.maximum(before[used - len(last) : used][::-1], last).min(axis=0)
                column = np.minimum.reduceat(slowest, block.first)
                best[used, block.starts, block.ends] = column
        return best

    def from_start(self, base: _Base, level: Level, within: int, start: int) -> FloatArray:
        """[machines, ends]: best splits of the ranges from set ``start`` to each larger one."""
        only = np.array([start], dtype=np.intp)
        return self.solve(base, level, within, only, self.blocks(start))[:, 0]

    def blocks(self, start: int) -> Iterator[_Block]:
        """All ranges from ``start``, small ends first: a block only needs those before it."""
        ends: list[int] = []
        cuts: list[IntArray] = []
        size = held = 0
        for end in self.sets.above(start):
            if ends and (self.sets.size(end) != size or held > _BLOCK):
                yield _block(ends, cuts)
                ends, cuts, held = [], [], 0
            size = self.sets.size(end)
            ends.append(int(end))
            cuts.append(self.sets.between(start, int(end)))
            held += len(cuts[-1])
        if ends:
            yield _block(ends, cuts)

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
        whole = list(self.blocks(0))
        most = max(1, _BATCH_BYTES // (8 * (level.machines + 1) * count))
        low, together = 0, 1
        while low < count:
            starts = np.arange(low, min(count, low + together))
            inside = self.sets.supersets(starts)
            blocks = [_inside(block, inside) for block in whole if block.ends[-1] > low]
            blocks = [block for block in blocks if len(block.ends)]
            found[starts] = self.solve(base, level, within, starts, blocks)[level.machines]
            # The next starts have a few cuts less each: as many as fill the tables of a block.
            cuts = sum(len(block.cuts) for block in blocks)
            wanted = _BLOCK * len(blocks) * len(starts) // max(1, cuts)
            low, together = low + len(starts), max(1, min(wanted, most))
        return found


def _block(ends: list[int], cuts: list[IntArray]) -> _Block:
    """The ranges from one start to ``ends``, each with its cuts."""
    lengths = [len(each) for each in cuts]
    first = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.intp)
    positions = np.arange(len(ends))
    return _Block(
        np.zeros(len(ends), dtype=np.intp),
        np.array(ends, dtype=np.intp),
        first,
        np.concatenate(cuts),
        np.repeat(positions, lengths),
    )


def _inside(block: _Block, supersets: npt.NDArray[np.bool_]) -> _Block:
    """What is left of a block of ranges from the empty set if they start at other sets.

    ``supersets`` has a row for each of these and says which sets hold it.
    """
    starts, kept = np.nonzero(supersets[:, block.cuts])
    ranges = block.range_of[kept]
    key = starts * len(block.ends) + ranges
    new = np.diff(key, prepend=-1) != 0
    first = np.flatnonzero(new)
    return _Block(
        starts[first], block.ends[ranges[first]], first, block.cuts[kept], np.cumsum(new) - 1
    )


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
        block = _block([end], [search.sets.between(start, end)])
        block = block._replace(starts=np.array([start], dtype=np.intp))
        seconds = search.stage_seconds(base, level, within, block)
        last = search.allowed(level, seconds, block, used)
        before = best[used - len(last) : used, block.cuts][::-1]
        hits = np.argwhere(np.maximum(before, last) == best[used, end])
        assert len(hits), "the table names a value that no stage attains"
        machines, low = int(hits[0, 0]) + 1, int(block.cuts[hits[0, 1]])
        found.append((low, end, machines))
        used, end = used - machines, low
    return found[::-1]
