"""``Layout``: a candidate of the search, in the form that moves change.

A layout says which *part* every unit belongs to. A part is a device of one copy, or
``replicas`` of them that share its work. What a part holds need not hang together: its
units fall into stages, the connected pieces, so that the tail of one branch and the head
of the next share a device as two stages and neither waits for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Layout(NamedTuple):
    """A candidate.

    Attributes:
        copies: R.
        replicas: Devices of each part, within one copy.
        assign: Part of each unit.
        micro_batch: r_s b_s of every stage, samples, unless ``part_batch`` says otherwise.
        part_batch: r_s b_s by part; empty: ``micro_batch`` for all.
        recompute: By part; empty: nowhere.
        slack: Quanta added to every in-flight bound.
        merged: Make one stage of all that a part holds (it must be convex).
        sequential: Run as a chain: stage i + 1 waits for stage i although no tensor passes.
        far: Put the copies of a part side by side (replica groups inside a node) instead of
            the parts of a copy.
        place: The order in which parts are given devices; empty: by number.
    """

    copies: int
    replicas: tuple[int, ...]
    assign: tuple[int, ...]
    micro_batch: int
    part_batch: tuple[int, ...] = ()
    recompute: tuple[bool, ...] = ()
    slack: int = 0
    merged: bool = False
    sequential: bool = False
    far: bool = False
    place: tuple[int, ...] = ()

    @property
    def devices(self) -> int:
        """Devices of one copy."""
        return sum(self.replicas)

    def batch_of(self, part: int) -> int:
        return self.part_batch[part] if self.part_batch else self.micro_batch

    def recomputes(self, part: int) -> bool:
        return bool(self.recompute) and self.recompute[part]


def pieces(
    predecessors: Sequence[Sequence[int]],
    assign: Sequence[int],
    fixed: Sequence[int],
) -> list[list[int]]:
    """Splits an assignment into stages: connected, convex, and acyclic among one another.

    Units are taken in their topological order; each joins the stage of one of its producers
    if that has the same part, and if neither has to wait for the other's neighbours: what the
    unit reads from elsewhere the stage has to wait for anyway (a join is a stage apart from
    the branch it ends), and what others read from the stage comes after the unit anyway.
    This also keeps the stages acyclic. Else the unit opens a stage. Stages with the same
    part, producers and consumers are then one (the tables of an embedding layer), since
    nothing is won by keeping them apart.

    Args:
        predecessors: Producers of each unit, all with lower numbers.
        assign: Part of each unit.
        fixed: Micro-batch size that each unit must have, 0: free; only units with the same
            share a stage.

    Returns:
        Units of each stage, ascending; stages in a topological order.
    """
    stage_of: list[int] = []
    stages: list[list[int]] = []
    above: list[int] = []  # for each stage the set of stages above it, as bits
    readers: list[int] = []  # for each stage the units that read from it, as bits
    read_by = [0] * len(assign)
    of_part: dict[int, int] = {}
    for unit, sources in enumerate(predecessors):
        of_part[assign[unit]] = of_part.get(assign[unit], 0) | 1 << unit
        for source in sources:
            read_by[source] |= 1 << unit
    below = _below(predecessors)
    for unit, sources in enumerate(predecessors):
        around = 0
        for source in sources:
            around |= 1 << stage_of[source]
        chosen = -1
        for source in sources:
            candidate = stage_of[source]
            if assign[source] != assign[unit] or fixed[source] != fixed[unit]:
                continue
            others = around & ~(1 << candidate)
            if others & ~above[candidate]:
                continue
            elsewhere = readers[candidate] & ~of_part[assign[unit]]
            if elsewhere & ~below[unit]:
                continue
            chosen = candidate
            break
        new = 0
        bits = around
        while bits:
            low = bits & -bits
            new |= low | above[low.bit_length() - 1]
            bits ^= low
        if chosen < 0:
            chosen = len(stages)
            stages.append([])
            above.append(new)
            readers.append(0)
        stages[chosen].append(unit)
        readers[chosen] |= read_by[unit]
        stage_of.append(chosen)
    return _ordered(_merge_twins(stages, stage_of, predecessors, assign, fixed), predecessors)


def _below(predecessors: Sequence[Sequence[int]]) -> list[int]:
    """Units below each unit, as bits."""
    below = [0] * len(predecessors)
    for unit in range(len(predecessors) - 1, -1, -1):
        bits = below[unit] | 1 << unit
        for source in predecessors[unit]:
            below[source] |= bits
    return below


def _merge_twins(
    stages: list[list[int]],
    stage_of: list[int],
    predecessors: Sequence[Sequence[int]],
    assign: Sequence[int],
    fixed: Sequence[int],
) -> list[list[int]]:
    parts = [assign[units[0]] for units in stages]
    if len(set(parts)) == len(parts):
        return stages
    sources: list[set[int]] = [set() for _ in stages]
    targets: list[set[int]] = [set() for _ in stages]
    for unit, items in enumerate(predecessors):
        s = stage_of[unit]
        for item in items:
            p = stage_of[item]
            if p != s:
                sources[s].add(p)
                targets[p].add(s)
    families: dict[tuple[int, int, frozenset[int], frozenset[int]], list[int]] = {}
    for s, units in enumerate(stages):
        key = (parts[s], fixed[units[0]], frozenset(sources[s]), frozenset(targets[s]))
        families.setdefault(key, []).extend(units)
    return [sorted(units) for units in families.values()]


def _ordered(stages: list[list[int]], predecessors: Sequence[Sequence[int]]) -> list[list[int]]:
    """The stages in a topological order, by depth and then by first unit."""
    stage_of = {unit: s for s, units in enumerate(stages) for unit in units}
    sources = [
        {stage_of[p] for unit in units for p in predecessors[unit]} - {s}
        for s, units in enumerate(stages)
    ]
    targets: list[list[int]] = [[] for _ in stages]
    waiting = [len(items) for items in sources]
    for s, items in enumerate(sources):
        for p in items:
            targets[p].append(s)
    order = sorted((s for s, count in enumerate(waiting) if not count), key=lambda s: stages[s][0])
    for s in order:  # grows while it is walked
        for t in sorted(targets[s], key=lambda item: stages[item][0]):
            waiting[t] -= 1
            if not waiting[t]:
                order.append(t)
    assert len(order) == len(stages), "stages form a cycle"
    return [stages[s] for s in order]


def merged_pieces(
    predecessors: Sequence[Sequence[int]],
    assign: Sequence[int],
    fixed: Sequence[int],
) -> list[list[int]] | None:
    """One stage for each part and size that its units must have; None if they form a cycle."""
    groups: dict[tuple[int, int], list[int]] = {}
    for unit, part in enumerate(assign):
        groups.setdefault((part, fixed[unit]), []).append(unit)
    stages = list(groups.values())
    stage_of = {unit: s for s, units in enumerate(stages) for unit in units}
    targets: list[set[int]] = [set() for _ in stages]
    for unit, sources in enumerate(predecessors):
        for source in sources:
            if stage_of[source] != stage_of[unit]:
                targets[stage_of[source]].add(stage_of[unit])
    waiting = [0] * len(stages)
    for items in targets:
        for t in items:
            waiting[t] += 1
    order = [s for s, count in enumerate(waiting) if not count]
    for s in order:  # grows while it is walked
        for t in sorted(targets[s]):
            waiting[t] -= 1
            if not waiting[t]:
                order.append(t)
    return [stages[s] for s in order] if len(order) == len(stages) else None
