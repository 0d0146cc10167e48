"""Where the time of an iteration goes: busy, filling, draining, waiting, by device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphpipe.plan.plan import Plan
from graphpipe.simulate.timeline import Event, Timeline


@dataclass(frozen=True)
class DeviceUse:
    """One device's share of an iteration. All times in nanoseconds.

    Attributes:
        rank: The device.
        stages: Ids of the stages that it hosts.
        forward_ns: Time in forward tasks.
        recompute_ns: The part of backward tasks that runs a forward again.
        backward_ns: Time in backward tasks without ``recompute_ns``.
        all_reduce_ns: Time in gradient all-reduces.
        optimizer_ns: Time in the optimizer step.
        busy_ns: Time in which at least one of them runs (they may overlap).
        fill_ns: Idle before the first event.
        wait_ns: Idle between events.
        drain_ns: Idle after the last event.
        sent_bytes: Bytes of the messages that it sends.
        received_bytes: Bytes of the messages that it receives.
    """

    rank: int
    stages: tuple[int, ...]
    forward_ns: int
    recompute_ns: int
    backward_ns: int
    all_reduce_ns: int
    optimizer_ns: int
    busy_ns: int
    fill_ns: int
    wait_ns: int
    drain_ns: int
    sent_bytes: int
    received_bytes: int

    @property
    def idle_ns(self) -> int:
        return self.fill_ns + self.wait_ns + self.drain_ns


def device_uses(plan: Plan, timeline: Timeline) -> tuple[DeviceUse, ...]:
    """The use of every device, by rank; devices without a stage are idle throughout."""
    events: list[list[Event]] = [[] for _ in range(plan.world_size)]
    for event in timeline.events:
        events[event.rank].append(event)
    sent = [0] * plan.world_size
    received = [0] * plan.world_size
    for transfer in timeline.transfers:
        sent[transfer.source] += transfer.nbytes
        received[transfer.target] += transfer.nbytes
    return tuple(
        _device_use(plan, timeline.iteration_ns, rank, events[rank], sent[rank], received[rank])
        for rank in range(plan.world_size)
    )


def bubble(uses: Sequence[DeviceUse], iteration_ns: int) -> float:
    """Idle share of the devices that host a stage, 0 to 1."""
    used = [use for use in uses if use.stages]
    total = iteration_ns * len(used)
    return sum(use.idle_ns for use in used) / total if total else 0.0


def busiest(uses: Sequence[DeviceUse]) -> DeviceUse:
    """The bottleneck: the device with the most busy time, the lowest rank among equals."""
    return max(uses, key=lambda use: (use.busy_ns, -use.rank))


def recompute_ns(plan: Plan, event: Event) -> int:
    """The part of a backward event in which its stage runs its forward again.

    The plan knows the share (forward over backward time of the device's kind); a measured
    event is divided in the same proportion.
    """
    stage = plan.stages[event.stage] if event.kind == "B" else None
    if stage is None or not stage.recompute:
        return 0
    times = stage.times.get(plan.cluster.devices[event.rank].kind)
    if times is None or times.backward_ns == 0:
        return 0
    share = min(1.0, times.forward_ns / times.backward_ns)
    return round((event.end_ns - event.start_ns) * share)


def _device_use(
    plan: Plan, iteration_ns: int, rank: int, events: list[Event], sent: int, received: int
) -> DeviceUse:
    spent = {"F": 0, "B": 0, "all_reduce": 0, "optimizer": 0}
    again = 0
    for event in events:
        spent[event.kind] += event.end_ns - event.start_ns
        again += recompute_ns(plan, event)
    first = min((event.start_ns for event in events), default=iteration_ns)
    last = max((event.end_ns for event in events), default=iteration_ns)
    busy = covered_ns((event.start_ns, event.end_ns) for event in events)
    return DeviceUse(
        rank=rank,
        stages=plan.stages_of_device[rank],
        forward_ns=spent["F"],
        recompute_ns=again,
        backward_ns=spent["B"] - again,
        all_reduce_ns=spent["all_reduce"],
        optimizer_ns=spent["optimizer"],
        busy_ns=busy,
        fill_ns=first,
        wait_ns=last - first - busy,
        drain_ns=max(0, iteration_ns - last),
        sent_bytes=sent,
        received_bytes=received,
    )


def covered_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union of half-open intervals."""
    total = 0
    reached = 0
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
