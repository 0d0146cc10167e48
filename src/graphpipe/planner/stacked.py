"""``Stacked``: a candidate whose stages have layouts of their own on the same devices.

A :class:`~graphpipe.planner.layout.Layout` gives each device of a copy to one part. Here a
stage names its devices itself, and a device may host any number of stages: an encoder
replicated over (or spread in pieces over) the devices of a trunk, or several pieces of the
trunk that follow one another at a distance (interleaving).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import ceil
from typing import NamedTuple

from graphpipe.plan.assemble import StageChoice
from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec
from graphpipe.plan.task_graph import TaskGraph, lane_bound
from graphpipe.planner.interleave import most_in_flight, round_robin_lists
from graphpipe.planner.space import Space, stage_edges
from graphpipe.planner.unit_graph import IMPOSSIBLE_NS, StageFacts


class Hosted(NamedTuple):
    """A stage: its units (ascending), its devices within a copy (one for each replica),
    b_s, whether it recomputes, and quanta added to its in-flight bound."""

    units: tuple[int, ...]
    slots: tuple[int, ...]
    micro_batch: int
    recompute: bool = False
    slack: int = 0


class Stacked(NamedTuple):
    """A candidate.

    Attributes:
        copies: R.
        devices: Devices of a copy; stages name them 0 to ``devices`` - 1.
        stages: In a topological order.
        depth_share: How much of its quantum a stage adds to the in-flight bound of its
            producers, between 0 (the share of the device's time that the stage takes) and 1
            (all of it, the bound for one stage a device).
        far: Put the copies of a device side by side instead of the devices of a copy.
        trunk: Stages that run in the fixed order of interleaved 1F1B, the first on the first
            device of the round and so on; empty: every stage is scheduled freely.
        extra: Forwards that the fixed order starts with beyond what fills the pipeline.
    """

    copies: int
    devices: int
    stages: tuple[Hosted, ...]
    depth_share: float = 1.0
    far: bool = False
    trunk: tuple[int, ...] = ()
    extra: int = 0


class Group(NamedTuple):
    """Ranks that sum the gradients of a stage, and bytes of these."""

    ranks: tuple[int, ...]
    nbytes: float


class Hosting:
    """A candidate in numbers.

    Args:
        space: The search space.
        candidate: The candidate.

    Attributes:
        facts: Facts of each stage.
        edges: What passes between stages.
        busy_ns: By device of a copy, the time of all its tasks.
    """

    def __init__(self, space: Space, candidate: Stacked) -> None:
        self.space = space
        self.candidate = candidate
        self.facts: tuple[StageFacts, ...] = tuple(
            space.units.facts(stage.units) for stage in candidate.stages
        )
        self.samples = space.samples(candidate.copies)
        self.times = self._times()

    @cached_property
    def edges(self) -> tuple[EdgeSpec, ...]:
        """What passes between stages."""
        return stage_edges(
            self.space.units, [stage.units for stage in self.candidate.stages], self.facts
        )

    @cached_property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """``slots[i][c]``: rank of device i of copy c."""
        item = self.candidate
        return self.space.slots(item.copies, item.devices, item.far)

    def ranks(self, stage: int, copy: int) -> tuple[int, ...]:
        """Ranks of a stage's replicas in a copy."""
        return tuple(self.slots[slot][copy] for slot in self.candidate.stages[stage].slots)

    def _times(self) -> tuple[tuple[int, int], ...] | None:
        """Forward and backward nanoseconds of each stage; None if one cannot run."""
        space, copies = self.space, self.candidate.copies
        samples, fewest = self.samples, space.batch_size // copies
        out = []
        for stage, fact in zip(self.candidate.stages, self.facts, strict=True):
            size = stage.micro_batch
            if not 1 <= size <= samples:
                return None
            wanted = {space.fixed[u] for u in stage.units if space.fixed[u]}
            if any(min(value, samples) != size for value in wanted):
                return None
            if any(value >= space.batch_size for value in wanted) and (
                copies > 1 or len(stage.slots) > 1
            ):
                return None
            if fewest < samples and -(-fewest // size) != -(-samples // size):
                return None  # copies run the same task lists
            rests = [rest for rest in (fewest % size, samples % size) if rest]
            least = max(space.units.least_samples[u] for u in stage.units)
            if rests and min(rests) < least:
                return None
            forward = backward = 0
            for kind in space.kinds:
                f, b = space.stage_ns(stage.units, kind, size)
                forward, backward = max(forward, f), max(backward, b)
            if forward >= IMPOSSIBLE_NS or backward >= IMPOSSIBLE_NS:
                return None
            if not fact.has_backward:
                backward = 0
            elif stage.recompute:
                backward += forward
            out.append((forward, backward))
        return tuple(out)

    @cached_property
    def busy_ns(self) -> list[float]:
        assert self.times is not None
        out = [0.0] * self.candidate.devices
        for stage, (forward, backward) in zip(self.candidate.stages, self.times, strict=True):
            tasks = self.samples / stage.micro_batch / len(stage.slots)
            for slot in stage.slots:
                out[slot] += tasks * (forward + backward)
        return out

    @cached_property
    def groups(self) -> list[Group]:
        """Gradient reductions, stage by stage."""
        out = []
        for s, fact in enumerate(self.facts):
            ranks = sorted({r for c in range(self.candidate.copies) for r in self.ranks(s, c)})
            if fact.gradient and fact.has_backward and len(ranks) > 1:
                out.append(Group(tuple(ranks), fact.gradient))
        return out

    @cached_property
    def optimizer_ns(self) -> list[float]:
        """Optimizer step by device of a copy."""
        out = [0.0] * self.candidate.devices
        costs, devices = self.space.units.costs, self.space.cluster.devices
        for stage, fact in zip(self.candidate.stages, self.facts, strict=True):
            if fact.has_backward:
                for slot in stage.slots:
                    kind = devices[self.slots[slot][0]].kind
                    step = costs.device_costs(kind)
                    seconds = step.optimizer_seconds(fact.gradient, fact.gradient_tensors)
                    out[slot] += seconds * 1e9
        return out

    @cached_property
    def after_ns(self) -> list[float]:
        """What follows the last task, by device of a copy: reductions and optimizer step."""
        out = list(self.optimizer_ns)
        cluster = self.space.cluster
        for group in self.groups:
            seconds = cluster.all_reduce_seconds(group.ranks, group.nbytes)
            for slot, ranks in enumerate(self.slots):
                if ranks[0] in group.ranks:
                    out[slot] += seconds * 1e9
        return out

    @cached_property
    def trunk_lists(self) -> list[list[tuple[bool, int, int]]]:
        """The fixed order: by device of the round (backward, stage, micro-batch)."""
        item = self.candidate
        if not item.trunk:
            return []
        around = len({item.stages[s].slots for s in item.trunk})
        size = item.stages[item.trunk[0]].micro_batch
        lists = round_robin_lists(len(item.trunk), around, -(-self.samples // size), item.extra)
        return [
            [
                (backward, item.trunk[piece], i)
                for backward, piece, i in line
                if self.facts[item.trunk[piece]].has_backward or not backward
            ]
            for line in lists
        ]

    def order(self, graph: TaskGraph) -> list[list[int]]:
        """The fixed order as task numbers."""
        return [
            [(graph.backward if back else graph.forward)[s] + i for back, s, i in line]
            for line in self.trunk_lists
        ]

    @cached_property
    def _kept(self) -> dict[int, int]:
        """In-flight samples of the stages in the fixed order."""
        out = {}
        for line in self.trunk_lists:
            for s, most in most_in_flight(line).items():
                out[s] = min(self.samples, most * self.candidate.stages[s].micro_batch)
        return out

    @cached_property
    def bounds(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """k_s and W_s.

        As in :func:`graphpipe.plan.in_flight.in_flight_bounds`, but that a stage that takes
        only a share of its device's time adds only a share of its quantum: while it waits for
        its turn its neighbours do not stand still.
        """
        item = self.candidate
        assert self.times is not None
        count = len(item.stages)
        consumers: list[list[tuple[int, bool]]] = [[] for _ in range(count)]
        for edge in self.edges:
            consumers[edge.source].append((edge.target, edge.has_gradient))
        block = [1] * count
        need = [0.0] * count
        bound = [0] * count
        quanta = [0] * count
        for s in range(count - 1, -1, -1):
            stage = item.stages[s]
            unit = len(stage.slots) * stage.micro_batch
            backward = self.facts[s].has_backward
            if backward:
                largest = max((quanta[c] for c, _ in consumers[s]), default=1)
                block[s] = max(1, ceil(largest / unit))
            quantum = quanta[s] = unit * block[s]
            busy = max(self.busy_ns[slot] for slot in stage.slots)
            mine = self.samples / unit * sum(self.times[s])
            share = mine / busy if busy else 1.0
            share += (1 - share) * item.depth_share
            add = quantum * share
            value = float(quantum)
            for c, returns in consumers[s]:
                if backward and not returns:
                    continue
                over = max(0, stage.micro_batch * block[s] - quanta[c])
                value = max(value, need[c] + add + over, bound[c])
            if s in self._kept and backward:
                value = float(max(quantum, self._kept[s]))
            need[s] = max(float(quantum), value + stage.slack * quantum)
            bound[s] = min(self.samples, ceil(need[s] / quantum - 1e-9) * quantum)
        return tuple(block), tuple(bound)

    def problem(self, copy: int = 0) -> PipelineProblem:
        """A copy of the candidate for a scheduler."""
        assert self.times is not None
        block, in_flight = self.bounds
        stages = tuple(
            StageSpec(
                stage.micro_batch,
                len(stage.slots),
                block[s],
                in_flight[s],
                self.ranks(s, copy),
                *self.times[s],
                self.facts[s].has_backward,
            )
            for s, stage in enumerate(self.candidate.stages)
        )
        return PipelineProblem(stages, self.edges, self.samples, self.space.cluster.world_size)

    @cached_property
    def need_bytes(self) -> list[float]:
        """Bytes by device of a copy, by the in-flight bounds."""
        out = list(self._base_bytes)
        work = [0.0] * self.candidate.devices
        for s, stage in enumerate(self.candidate.stages):
            held, extra = self._held_bytes(s)
            lane = lane_bound(self.bounds[1][s], len(stage.slots), stage.micro_batch)
            if stage.recompute:
                extra += self._saved(s)
            for slot in stage.slots:
                out[slot] += lane * held
                work[slot] = max(work[slot], extra)
        return [a + b for a, b in zip(out, work, strict=True)]

    def peak_bytes(self, graph: TaskGraph, lines: Sequence[Sequence[int]]) -> list[float]:
        """Bytes by device of a copy that a schedule of the first copy holds at most.

        Args:
            graph: The tasks.
            lines: Their numbers by rank.
        """
        item = self.candidate
        base = list(self._base_bytes)
        saved, extra = [], []
        for s, stage in enumerate(item.stages):
            held, work = self._held_bytes(s)
            saved.append(held)
            extra.append((work, work + (self._saved(s) if stage.recompute else 0.0)))
        for slot, ranks in enumerate(self.slots):
            now = peak = 0.0
            for task in lines[ranks[0]]:
                s = graph.stage[task]
                start = graph.backward[s]
                if start >= 0 and task >= start:
                    peak = max(peak, now + extra[s][1])
                    now -= saved[s]
                else:
                    now += saved[s]
                    peak = max(peak, now + extra[s][0])
            base[slot] += peak
        return base

    def _saved(self, s: int) -> float:
        fact, size = self.facts[s], self.candidate.stages[s].micro_batch
        return fact.saved_fixed + fact.saved_bytes * size

    def _held_bytes(self, s: int) -> tuple[float, float]:
        """Bytes of a micro-batch in flight, and workspace of a task."""
        fact, size = self.facts[s], self.candidate.stages[s].micro_batch
        work = fact.workspace_fixed + fact.workspace_bytes * size
        if self.candidate.stages[s].recompute:
            return fact.input_fixed + fact.input_bytes * size, work
        return self._saved(s), work

    @cached_property
    def _base_bytes(self) -> list[float]:
        """Parameters and what goes with them, and buffers of messages, by device of a copy."""
        out = [0.0] * self.candidate.devices
        for s, stage in enumerate(self.candidate.stages):
            for slot in stage.slots:
                out[slot] += self.facts[s].static
        for edge in self.edges:
            source, target = self.candidate.stages[edge.source], self.candidate.stages[edge.target]
            for slot in target.slots:
                out[slot] += 2 * (edge.forward_fixed + edge.forward_bytes * target.micro_batch)
            for slot in source.slots:
                out[slot] += 2 * (edge.backward_fixed + edge.backward_bytes * source.micro_batch)
        return out

    def kept_bounds(self, graph: TaskGraph, lines: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """W_s that a schedule keeps to: samples in flight at most, by stage with a backward."""
        item = self.candidate
        out = list(self.bounds[1])
        most: dict[int, int] = {}
        for line in lines:
            now: dict[int, int] = {}
            for task in line:
                s = graph.stage[task]
                start = graph.backward[s]
                now[s] = now.get(s, 0) + (-1 if start >= 0 and task >= start else 1)
                most[s] = max(most.get(s, 0), now[s])
        for s, stage in enumerate(item.stages):
            if self.facts[s].has_backward:
                unit = stage.micro_batch * len(stage.slots)
                out[s] = min(self.samples, most.get(s, 1) * unit)
        return tuple(out)

    @cached_property
    def bound_ns(self) -> float:
        """A bound for the iteration: of each device the work, before it the way of the first
        micro-batch to it, after it the way of its gradients back."""
        item = self.candidate
        assert self.times is not None
        count = len(item.stages)
        first = [0.0] * count
        rest = [0.0] * count
        for s, stage in enumerate(item.stages):
            rest[s] = max(self.after_ns[slot] for slot in stage.slots)
        for edge in self.edges:
            s, p = edge.target, edge.source
            source = item.stages[p]
            turns = -(-item.stages[s].micro_batch // (source.micro_batch * len(source.slots)))
            forward, backward = self.times[p]
            first[s] = max(first[s], first[p] + forward * max(1, turns))
            if edge.has_gradient:
                rest[s] = max(rest[s], rest[p] + backward * max(1, turns))
        out = 0.0
        for slot in range(item.devices):
            mine = [s for s in range(count) if slot in item.stages[s].slots]
            if mine:
                least = min(first[s] for s in mine), min(rest[s] for s in mine)
                out = max(out, least[0] + self.busy_ns[slot] + least[1])
        return out

    def lacking(self, need: Sequence[float]) -> list[float]:
        """Bytes that each device of a copy lacks for a need; negative: has to spare."""
        memory, margin = self.space.memory, self.space.margin
        return [
            bytes_ - min(memory[rank] for rank in ranks) + margin
            for bytes_, ranks in zip(need, self.slots, strict=True)
        ]

    @property
    def static_fits(self) -> bool:
        """Whether parameters and what goes with them fit every device."""
        return max(self.lacking(self._base_bytes)) <= 0

    def saving(self, s: int) -> float:
        """Bytes that recomputation of a stage would save on each of its devices."""
        stage, fact = self.candidate.stages[s], self.facts[s]
        if stage.recompute or not fact.has_backward:
            return 0.0
        size = stage.micro_batch
        lane = lane_bound(self.bounds[1][s], len(stage.slots), size)
        kept = fact.input_fixed + fact.input_bytes * size
        return (lane - 1) * self._saved(s) - lane * kept

    def recompute_ns(self, s: int) -> float:
        """Time that recomputation of a stage adds to each of its devices."""
        assert self.times is not None
        stage = self.candidate.stages[s]
        return self.times[s][0] * self.samples / stage.micro_batch / len(stage.slots)

    def choices(self, specs: Sequence[StageSpec]) -> list[StageChoice]:
        """The stages of a plan, with blocks and in-flight bounds of ``specs``."""
        graph, members = self.space.units.graph, self.space.units.members
        out = []
        for s, stage in enumerate(self.candidate.stages):
            ops = sorted(op for u in stage.units for op in members[u])
            copies = range(self.candidate.copies)
            out.append(
                StageChoice(
                    ops=tuple(graph.ops[op].name for op in ops),
                    micro_batch=stage.micro_batch,
                    replicas=len(stage.slots),
                    devices=tuple(rank for c in copies for rank in self.ranks(s, c)),
                    block=specs[s].block,
                    in_flight=specs[s].in_flight,
                    recompute=stage.recompute and self.facts[s].has_backward,
                )
            )
        return out


def checked(space: Space, stages: Sequence[Hosted]) -> bool:
    """Whether stages stand in a topological order and hold every unit once."""
    place: dict[int, int] = {}
    for s, stage in enumerate(stages):
        for u in stage.units:
            if u in place:
                return False
            place[u] = s
    return len(place) == len(space.units) and all(
        place[source] <= place[u]
        for u, sources in enumerate(space.units.predecessors)
        for source in sources
    )
