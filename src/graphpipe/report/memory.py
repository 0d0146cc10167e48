"""Memory of every device over an iteration, from the plan and the events of a timeline."""

from __future__ import annotations

from itertools import groupby

from graphpipe.plan.plan import Plan
from graphpipe.plan.ranges import copy_range, micro_batch_range
from graphpipe.simulate.timeline import Timeline

Steps = tuple[tuple[int, int], ...]
"""(nanoseconds, bytes from then on), times ascending."""


def memory_steps(plan: Plan, timeline: Timeline) -> tuple[Steps, ...]:
    """For every rank the bytes in use over time.

    Parameters, gradients and optimizer state are there all the time. A micro-batch's saved
    activations are there from the start of its forward to the end of its backward (a stage
    without a backward keeps none), in proportion to its samples; workspace, and the
    activations that a recomputation makes again, only while the task runs.
    """
    changes: list[list[tuple[int, int]]] = [
        [(0, sum(plan.stages[s].memory.static for s in hosted))] for hosted in plan.stages_of_device
    ]
    for event in timeline.events:
        if event.kind not in ("F", "B"):
            continue
        stage = plan.stages[event.stage]
        memory = stage.memory
        samples = _samples(plan, event.rank, event.stage, event.micro_batch)
        share = samples / stage.micro_batch
        saved = round(memory.saved_per_micro_batch * share) if stage.has_backward else 0
        passing = memory.workspace + (
            round(memory.recompute * share) if event.kind == "B" and stage.recompute else 0
        )
        line = changes[event.rank]
        line.append((event.start_ns, passing + (saved if event.kind == "F" else 0)))
        line.append((event.end_ns, -passing - (saved if event.kind == "B" else 0)))
    return tuple(_accumulate(line) for line in changes)


def _samples(plan: Plan, rank: int, stage_id: int, micro_batch: int) -> int:
    stage = plan.stages[stage_id]
    copy = stage.devices.index(rank) // stage.replicas
    owned = copy_range(copy, plan.copies, plan.batch_size)
    return len(micro_batch_range(owned, stage.micro_batch, micro_batch))


def _accumulate(changes: list[tuple[int, int]]) -> Steps:
    steps: list[tuple[int, int]] = []
    level = 0
    for at, group in groupby(sorted(changes), key=lambda change: change[0]):
        level += sum(change for _, change in group)
        if not steps or steps[-1][1] != level:
            steps.append((at, level))
    return tuple(steps)
