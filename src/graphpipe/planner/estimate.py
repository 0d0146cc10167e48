"""What a layout takes, in closed form: good enough to rank thousands in a second.

A device is busy for the sum of its tasks. It cannot start before the first micro-batch has
come down the shortest of its paths from the sources, and after its last task the gradients
still have to travel back. So the iteration takes at least

    earliest start + work of the device + way back to the sources,

for every device, plus the reduction of its gradients and the optimizer step. With enough
samples in flight a list schedule comes close to the largest of these. The simulator decides
among the best.
"""

from __future__ import annotations

from typing import NamedTuple

from graphpipe.planner.layout import Layout
from graphpipe.planner.space import Space, StageNumbers, Structure


class Estimate(NamedTuple):
    """``iteration_ns``; by part the bytes that its devices lack (negative: have to spare) and
    ``load``, the nanoseconds by which it bounds the iteration."""

    iteration_ns: float
    lack: tuple[float, ...]
    load: tuple[float, ...]

    @property
    def lacking(self) -> float:
        """Bytes that the fullest device lacks; 0 if everything fits."""
        return max(0.0, *self.lack)


def estimate(space: Space, layout: Layout) -> Estimate | None:
    """Closed-form iteration time of a layout; None if it is not legal."""
    structure = space.structure(layout.assign, layout.merged)
    if structure is None:
        return None
    ranks = space.part_ranks(layout)
    numbers = space.numbers(layout, structure, ranks)
    if numbers is None:
        return None
    samples = space.samples(layout.copies)
    parts = len(layout.replicas)
    count = len(numbers)
    chain = layout.sequential
    link = space.cluster.link
    per_nic = space.cluster.network.devices_per_nic
    devices = space.cluster.devices

    first = [0.0] * count  # earliest start of the stage's first forward
    delay: list[tuple[float, float]] = []  # forward and backward wire time of each edge
    wire = [0.0] * parts  # time that the network card of a device is busy
    for edge in structure.edges:
        here, there = ranks[structure.part[edge.source]], ranks[structure.part[edge.target]]
        if here[0] == there[0]:
            delay.append((0.0, 0.0))
            continue
        latency, bandwidth = link(here[0], there[0])
        if bandwidth is None:
            delay.append((latency * 1e9, latency * 1e9))
            continue
        size = min(numbers[edge.source].micro_batch, numbers[edge.target].micro_batch)
        crossing = devices[here[0]].node != devices[there[0]].node
        scale = 1e9 / bandwidth * (per_nic if crossing and layout.far else 1)
        delay.append(
            (
                latency * 1e9 + edge.forward_bytes * size * scale,
                latency * 1e9 + edge.backward_bytes * size * scale,
            )
        )
        share = samples * scale
        source, target = structure.part[edge.source], structure.part[edge.target]
        wire[source] += edge.forward_bytes * share / layout.replicas[source]
        wire[target] += edge.backward_bytes * share / layout.replicas[target]

    for s in range(count):
        size = numbers[s].micro_batch
        start = 0.0
        for p, e in structure.producers[s]:
            item = numbers[p]
            rounds = -(-size // (item.micro_batch * item.replicas))
            start = max(start, first[p] + item.forward_ns * max(1, rounds) + delay[e][0])
        if chain and s:
            start = max(start, first[s - 1] + numbers[s - 1].forward_ns)
        first[s] = start

    # The way back: after the last task of a stage, its producers still have to run theirs.
    after = after_ns(space, layout, structure, ranks)
    rest = [0.0] * count
    for s in range(count):
        size = numbers[s].micro_batch
        tail = after[structure.part[s]]
        for p, e in structure.producers[s]:
            if not structure.edges[e].has_gradient:
                continue
            item = numbers[p]
            rounds = -(-size // (item.micro_batch * item.replicas))
            tail = max(tail, rest[p] + item.backward_ns * max(1, rounds) + delay[e][1])
        if chain and s:
            tail = max(tail, rest[s - 1] + numbers[s - 1].backward_ns)
        rest[s] = tail

    load: list[float] = []
    for part, stages in enumerate(structure.of_part):
        # All work of the stages that cannot start before some time comes after it, and then
        # the shortest of their ways back: true for each such time.
        stages = sorted(stages, key=first.__getitem__, reverse=True)
        busy, claim, least = 0.0, 0.0, float("inf")
        for s in stages:
            item = numbers[s]
            tasks = -(-samples // (item.micro_batch * item.replicas))
            busy += tasks * (item.forward_ns + item.backward_ns)
            least = min(least, rest[s])
            claim = max(claim, first[s] + max(busy, wire[part]) + least)
        load.append(claim)
    lack = memory_lack(space, layout, structure, numbers, ranks)
    return Estimate(max(load), tuple(lack), tuple(load))


def after_ns(
    space: Space, layout: Layout, structure: Structure, ranks: list[tuple[int, ...]]
) -> list[float]:
    """Nanoseconds of gradient reduction and optimizer step, by part."""
    out = [0.0] * len(layout.replicas)
    devices = space.cluster.devices
    costs = space.units.costs
    for part, stages in enumerate(structure.of_part):
        gradient = sum(structure.facts[s].gradient for s in stages)
        tensors = sum(structure.facts[s].gradient_tensors for s in stages)
        if gradient:
            kind = devices[ranks[part][0]].kind
            step = costs.device_costs(kind).optimizer_seconds(gradient, tensors)
            out[part] = step * 1e9 + space.all_reduce_ns(ranks[part], gradient)
    return out


def memory_lack(
    space: Space,
    layout: Layout,
    structure: Structure,
    numbers: list[StageNumbers],
    ranks: list[tuple[int, ...]],
) -> list[float]:
    """Bytes that each part's device lacks (negative: has to spare), by the in-flight bounds."""
    out: list[float] = []
    in_flight: tuple[int, ...] | None = None
    for part, stages in enumerate(structure.of_part):
        room = min(space.memory[rank] for rank in ranks[part]) - space.margin
        facts = [structure.facts[s] for s in stages]
        least = sum(fact.static for fact in facts)
        most = least + sum(
            (fact.saved_bytes + fact.workspace_bytes) * space.batch_size
            + fact.workspace_fixed
            + fact.saved_fixed * space.batch_size
            for fact in facts
        )
        if most <= room:
            out.append(most - room)
            continue
        if in_flight is None:
            _, in_flight = space.bounds(layout, structure, numbers)
        need, extra = least, 0.0
        for s, fact in zip(stages, facts, strict=True):
            item = numbers[s]
            held = -(-in_flight[s] // (item.micro_batch * item.replicas))
            saved = fact.saved_fixed + fact.saved_bytes * item.micro_batch
            work = fact.workspace_fixed + fact.workspace_bytes * item.micro_batch
            if layout.recomputes(part):
                need += held * (fact.input_fixed + fact.input_bytes * item.micro_batch)
                work += saved
            else:
                need += held * saved
            extra = max(extra, work)
        out.append(need + extra - room)
    return out
