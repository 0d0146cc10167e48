"""A measured iteration as a :class:`~graphpipe.simulate.timeline.Timeline`."""

from __future__ import annotations

from collections.abc import Sequence

from graphpipe.plan.plan import Plan
from graphpipe.runtime.executor import TaskRecord
from graphpipe.simulate.timeline import Event, Timeline


def measured_timeline(plan: Plan, records: Sequence[tuple[int, TaskRecord]]) -> Timeline:
    """The timeline of what was measured.

    Each rank's times count from its own start of the iteration; ranks start together but
    for the skew of the call before.

    Args:
        plan: The plan that ran.
        records: (rank, record); records of kind ``step`` span a rank's whole iteration.
    """
    spans = [record.end_ns for _, record in records if record.kind == "step"]
    events = [
        Event(
            rank=rank,
            kind="F" if record.kind == "F" else "B",
            start_ns=record.start_ns,
            end_ns=record.end_ns,
            stage=record.stage,
            micro_batch=record.micro_batch,
        )
        for rank, record in records
        if record.kind != "step"
    ]
    return Timeline(
        world_size=plan.world_size,
        iteration_ns=max(spans, default=0),
        network="measured",
        events=tuple(events),
        peak_in_flight=_peaks(plan, events),
        stage_names=tuple(stage.name for stage in plan.stages),
    )


def _peaks(plan: Plan, events: Sequence[Event]) -> tuple[int, ...]:
    """Largest number of samples in flight in each stage of one copy, full micro-batches."""
    peaks: list[int] = []
    for number, stage in enumerate(plan.stages):
        most = 0
        for copy in range(plan.copies):
            ranks = set(stage.devices[copy * stage.replicas : (copy + 1) * stage.replicas])
            steps: list[tuple[int, int]] = []
            for event in events:
                if event.stage == number and event.rank in ranks and stage.has_backward:
                    if event.kind == "F":
                        steps.append((event.start_ns, 1))
                    else:
                        steps.append((event.end_ns, -1))
            level = 0
            for _, change in sorted(steps):
                level += change
                most = max(most, level)
        peaks.append(most * stage.micro_batch)
    return tuple(peaks)
