"""``Space``: the fixed data of one search, and what a layout means in it.

A layout becomes a :class:`Structure` (its stages and the edges between them, whatever the
micro-batch size) and a :class:`~graphpipe.plan.problem.PipelineProblem` (the integers that
schedulers and simulators work on). Structures are kept: a search asks for the same one with
many micro-batch sizes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphpipe.cost.cluster import Cluster
from graphpipe.plan.in_flight import in_flight_bounds
from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec
from graphpipe.planner.layout import Layout, merged_pieces, pieces
from graphpipe.planner.unit_graph import IMPOSSIBLE_NS, StageFacts, UnitGraph


@dataclass(eq=False)
class Structure:
    """Stages of a layout and what connects them.

    Attributes:
        stages: Units of each stage, ascending; stages in a topological order.
        part: Part of each stage.
        fixed: Micro-batch size that the stage must have, samples; 0: free.
        facts: Facts of each stage.
        edges: What passes between stages.
        consumers: For each stage (consumer, edge number) pairs.
        producers: For each stage (producer, edge number) pairs.
        of_part: Stages of each part.
    """

    stages: tuple[tuple[int, ...], ...]
    part: tuple[int, ...]
    fixed: tuple[int, ...]
    facts: tuple[StageFacts, ...]
    edges: tuple[EdgeSpec, ...]
    consumers: list[list[tuple[int, int]]]
    producers: list[list[tuple[int, int]]]
    of_part: list[list[int]]

    @cached_property
    def depth(self) -> int:
        """Stages on the longest path."""
        depth = [1] * len(self.stages)
        for s, items in enumerate(self.producers):
            depth[s] += max((depth[p] for p, _ in items), default=0)
        return max(depth)


def stage_edges(
    units: UnitGraph, stages: Sequence[Sequence[int]], facts: Sequence[StageFacts]
) -> tuple[EdgeSpec, ...]:
    """What passes between stages, by (source, target).

    Args:
        units: The unit graph.
        stages: Units of each stage; each unit is in exactly one.
        facts: Facts of each stage.
    """
    stage_of = [0] * len(units)
    for s, members in enumerate(stages):
        for u in members:
            stage_of[u] = s
    sums: dict[tuple[int, int], list[float]] = {}
    for tensor in units.tensors:
        source = stage_of[tensor.producer]
        targets = {stage_of[u] for u in tensor.consumers}
        targets.discard(source)
        for target in targets:
            row = sums.get((source, target))
            if row is None:
                row = sums[source, target] = [0.0, 0.0, 0.0, 0.0, 0, 0, 0]
            row[0] += tensor.forward_bytes
            row[1] += tensor.forward_fixed
            row[2] += tensor.backward_bytes
            row[3] += tensor.backward_fixed
            row[4] += tensor.has_gradient
            row[5] += tensor.batched
            row[6] += tensor.batched and tensor.has_gradient
    edges: list[EdgeSpec] = []
    for (source, target), row in sorted(sums.items()):
        gradient = row[4] > 0 and facts[source].has_backward and facts[target].has_backward
        edges.append(
            EdgeSpec(
                source, target, row[0], row[1], row[2], row[3], gradient, row[5] > 0, row[6] > 0
            )
        )
    return tuple(edges)


class StageNumbers(NamedTuple):
    """A stage with its sizes: replicas, micro-batch, nanoseconds forward and backward
    (recomputation included)."""

    replicas: int
    micro_batch: int
    forward_ns: int
    backward_ns: int


@dataclass(eq=False)
class Space:
    """The input of a search.

    Attributes:
        units: The unit graph.
        cluster: The devices.
        batch_size: B, samples.
        memory: Bytes that a plan may use, by rank.
        fixed: By unit the micro-batch size that it must have, samples; 0: free. B means that
            it has to see the whole mini-batch (a loss that couples all samples): its stage
            then has one replica, and the plan one copy.
        pin: Rank that a unit must be on; the plan then has one copy.
        margin: Bytes of each device to leave free: what the estimate of memory does not count
            (messages under way). ``memory`` is unchanged by it.
        ways: A memo of :mod:`graphpipe.planner.seeds`.
        rows: Another.
        scores: A memo of :mod:`graphpipe.planner.evaluate`.
    """

    units: UnitGraph
    cluster: Cluster
    batch_size: int
    memory: tuple[float, ...]
    fixed: tuple[int, ...]
    pin: dict[int, int] = field(default_factory=dict)
    margin: float = 0.0
    ways: dict[int, float] = field(default_factory=dict)
    rows: dict[tuple[int, int, bool, int, int], NDArray[np.floating[Any]]] = field(
        default_factory=dict
    )
    scores: dict[Hashable, Any] = field(default_factory=dict)
    _structures: dict[tuple[tuple[int, ...], bool], Structure | None] = field(default_factory=dict)
    _times: dict[tuple[tuple[int, ...], str, int], tuple[int, int]] = field(default_factory=dict)
    _slots: dict[tuple[int, int, bool], tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    _reductions: dict[tuple[tuple[int, ...], float], float] = field(default_factory=dict)

    @cached_property
    def any_whole(self) -> bool:
        """Whether some unit has to see the whole mini-batch."""
        return any(size >= self.batch_size for size in self.fixed)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        return self.cluster.kinds

    @cached_property
    def speed(self) -> dict[str, float]:
        """Relative speed of each kind of device on this graph; the fastest has 1."""
        sizes = self.units.costs.micro_batches
        total = {
            kind: max(1, sum(sum(row) for row in self.units.times(kind, sizes[len(sizes) // 2])))
            for kind in self.kinds
        }
        fastest = min(total.values())
        return {kind: fastest / time for kind, time in total.items()}

    def all_reduce_ns(self, ranks: tuple[int, ...], nbytes: float) -> float:
        """Nanoseconds of an all-reduce; moves ask for the same ones again and again."""
        if len(ranks) < 2:
            return 0.0
        key = (ranks, nbytes)
        found = self._reductions.get(key)
        if found is None:
            if len(self._reductions) > 50_000:
                self._reductions.clear()
            found = self._reductions[key] = self.cluster.all_reduce_seconds(ranks, nbytes) * 1e9
        return found

    def samples(self, copies: int) -> int:
        """Samples of the largest copy."""
        return -(-self.batch_size // copies)

    def slots(self, copies: int, devices: int, far: bool) -> tuple[tuple[int, ...], ...]:
        """Ranks of each slot: ``slots[i][c]`` is device i of copy c.

        Devices of a slot are of one kind wherever the numbers allow; the fastest kinds come
        last, where the trunk of a model is. ``far`` puts the copies of a slot side by side.
        """
        key = (copies, devices, far)
        found = self._slots.get(key)
        if found is not None:
            return found
        by_kind: dict[str, list[int]] = {}
        for rank, device in enumerate(self.cluster.devices):
            by_kind.setdefault(device.kind, []).append(rank)
        kinds = sorted(by_kind, key=lambda kind: (self.speed[kind], kind))
        slots: list[tuple[int, ...]] = []
        rest: list[int] = []
        for kind in kinds:
            ranks = by_kind[kind]
            full = len(ranks) // copies
            if far:
                slots += [tuple(ranks[i * copies : (i + 1) * copies]) for i in range(full)]
            else:
                if len(kinds) == 1:
                    full = min(full, devices)
                slots += [tuple(ranks[c * full + i] for c in range(copies)) for i in range(full)]
            rest += ranks[full * copies :]
        while len(rest) >= copies:
            slots.append(tuple(rest[:copies]))
            del rest[:copies]
        found = tuple(slots[len(slots) - devices :] if len(kinds) > 1 else slots[:devices])
        self._slots[key] = found
        return found

    def part_ranks(self, layout: Layout) -> list[tuple[int, ...]]:
        """Ranks of each part, copy by copy, replica by replica."""
        slots = self.slots(layout.copies, layout.devices, layout.far)
        parts = len(layout.replicas)
        if self.pin:
            return self._pinned_ranks(layout)
        out: list[tuple[int, ...]] = [()] * parts
        start = 0
        for part in layout.place or range(parts):
            count = layout.replicas[part]
            mine = slots[start : start + count]
            start += count
            out[part] = tuple(slot[c] for c in range(layout.copies) for slot in mine)
        return out

    def _pinned_ranks(self, layout: Layout) -> list[tuple[int, ...]]:
        """One copy; a part with a pinned unit has its rank, the others share the rest."""
        wanted = {layout.assign[u]: rank for u, rank in self.pin.items()}
        free = [rank for rank in range(self.cluster.world_size) if rank not in wanted.values()]
        out = []
        for part, count in enumerate(layout.replicas):
            mine = [wanted[part]] if part in wanted else []
            while len(mine) < count:
                mine.append(free.pop(0))
            out.append(tuple(mine))
        return out

    def structure(self, assign: tuple[int, ...], merged: bool) -> Structure | None:
        """Stages of an assignment; None if merging makes a cycle."""
        key = (assign, merged)
        if key not in self._structures:
            if len(self._structures) > 20_000:
                self._structures.clear()
            self._structures[key] = self._build(assign, merged)
        return self._structures[key]

    def _build(self, assign: tuple[int, ...], merged: bool) -> Structure | None:
        units = self.units
        cut = merged_pieces if merged else pieces
        stages = cut(units.predecessors, assign, self.fixed)
        if stages is None:
            return None
        facts = tuple(units.facts(tuple(members)) for members in stages)
        edges = stage_edges(units, stages, facts)
        consumers: list[list[tuple[int, int]]] = [[] for _ in stages]
        producers: list[list[tuple[int, int]]] = [[] for _ in stages]
        for number, edge in enumerate(edges):
            consumers[edge.source].append((edge.target, number))
            producers[edge.target].append((edge.source, number))
        part = tuple(assign[members[0]] for members in stages)
        of_part: list[list[int]] = [[] for _ in range(max(assign) + 1)]
        for s, p in enumerate(part):
            of_part[p].append(s)
        return Structure(
            tuple(tuple(members) for members in stages),
            part,
            tuple(self.fixed[members[0]] for members in stages),
            facts,
            edges,
            consumers,
            producers,
            of_part,
        )

    def stage_ns(self, stage: tuple[int, ...], kind: str, micro_batch: int) -> tuple[int, int]:
        """Forward and backward nanoseconds of a stage for one micro-batch on one device."""
        key = (stage, kind, micro_batch)
        found = self._times.get(key)
        if found is None:
            if len(self._times) > 200_000:
                self._times.clear()
            forward, backward = self.units.times(kind, micro_batch)
            found = self._times[key] = (
                sum([forward[u] for u in stage]),
                sum([backward[u] for u in stage]),
            )
        return found

    def numbers(
        self, layout: Layout, structure: Structure, ranks: Sequence[tuple[int, ...]]
    ) -> list[StageNumbers] | None:
        """Sizes and times of each stage; None if one cannot run at its size."""
        samples = self.samples(layout.copies)
        fewest = self.batch_size // layout.copies  # samples of the smallest copy
        only = self.kinds[0] if len(self.kinds) == 1 else None
        out: list[StageNumbers] = []
        for s, units in enumerate(structure.stages):
            part = structure.part[s]
            replicas = layout.replicas[part]
            if structure.fixed[s]:
                size = min(structure.fixed[s], samples)
                if structure.fixed[s] >= self.batch_size:
                    replicas = 1
            else:
                batch = layout.batch_of(part)
                # Equal r_s b_s where it divides; else equal b_s.
                size = batch // replicas if batch % replicas == 0 else batch
                if not 1 <= size <= samples:
                    return None
            if fewest < samples and -(-fewest // size) != -(-samples // size):
                # Copies run the same task lists.
                return None
            rests = [rest for rest in (fewest % size, samples % size) if rest]
            if rests and min(rests) < max([self.units.least_samples[u] for u in units]):
                return None
            if only is not None:
                forward, backward = self.stage_ns(units, only, size)
            else:
                forward = backward = 0
                for kind in {self.cluster.devices[rank].kind for rank in ranks[part]}:
                    f, b = self.stage_ns(units, kind, size)
                    forward, backward = max(forward, f), max(backward, b)
            if forward >= IMPOSSIBLE_NS or backward >= IMPOSSIBLE_NS:
                return None
            if not structure.facts[s].has_backward:
                backward = 0
            elif layout.recomputes(part):
                backward += forward
            out.append(StageNumbers(replicas, size, forward, backward))
        return out

    def bounds(
        self, layout: Layout, structure: Structure, numbers: Sequence[StageNumbers]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """k_s and W_s of each stage."""
        count = len(numbers)
        edges = [(edge.source, edge.target) for edge in structure.edges]
        silent = {(e.source, e.target) for e in structure.edges if not e.has_gradient}
        if layout.sequential:
            extra = list(pairwise(range(count)))
            silent -= set(extra)
            edges += [pair for pair in extra if pair not in edges]
        bounds = in_flight_bounds(
            [item.micro_batch for item in numbers],
            [item.replicas for item in numbers],
            edges,
            self.samples(layout.copies),
            has_backward=[fact.has_backward for fact in structure.facts],
            without_gradient=silent,
            slack=layout.slack,
        )
        return bounds.block, bounds.in_flight

    def problem(self, layout: Layout, copy: int = 0) -> PipelineProblem | None:
        """One copy of the layout for a scheduler; None if it is not legal."""
        structure = self.structure(layout.assign, layout.merged)
        if structure is None:
            return None
        ranks = self.part_ranks(layout)
        numbers = self.numbers(layout, structure, ranks)
        if numbers is None:
            return None
        block, in_flight = self.bounds(layout, structure, numbers)
        stages = []
        for s, item in enumerate(numbers):
            part = structure.part[s]
            per_copy = layout.replicas[part]
            first = copy * per_copy
            stages.append(
                StageSpec(
                    item.micro_batch,
                    item.replicas,
                    block[s],
                    in_flight[s],
                    ranks[part][first : first + item.replicas],
                    item.forward_ns,
                    item.backward_ns,
                    structure.facts[s].has_backward,
                )
            )
        edges = structure.edges
        if layout.sequential:
            present = {(edge.source, edge.target) for edge in edges}
            extra = [
                EdgeSpec(s, s + 1, has_gradient=structure.facts[s].has_backward)
                for s in range(len(stages) - 1)
                if (s, s + 1) not in present
            ]
            edges = (*edges, *extra)
        return PipelineProblem(
            tuple(stages), edges, self.samples(layout.copies), self.cluster.world_size
        )
