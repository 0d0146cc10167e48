"""A plan's schedule in the notation of ``torch.distributed.pipelining``.

That library writes a schedule as CSV: a row for each rank, in it the actions in order,
``2F0`` for the forward and ``2B0`` for the backward of micro-batch 0 in stage 2.
"""

from __future__ import annotations

import csv
import io

from graphpipe.errors import PlanError
from graphpipe.plan.plan import Plan


def schedule_csv(plan: Plan) -> str:
    """The schedule of any plan in that notation, with the plan's own stage ids.

    Row r is device r; a device without tasks has an empty row. With several copies, micro-batches
    count from 0 within each copy. What torch itself can run is narrower: see
    :func:`torch_schedule_csv`.
    """
    return _csv(plan, range(plan.world_size), list(range(len(plan.stages))))


def torch_schedule_csv(plan: Plan) -> str:
    """The schedule of a chain plan as torch's ``_PipelineScheduleRuntime`` loads it.

    Stages are numbered along the chain and rows are the ranks that host one, ascending.

    Raises:
        PlanError: if the plan says something that torch's pipelines cannot: several branches,
            a skip, replicas, copies, unequal micro-batches, a stage without a backward.
    """
    order = chain_order(plan)
    position = {stage: index for index, stage in enumerate(order)}
    ranks = sorted({rank for stage in plan.stages for rank in stage.devices})
    return _csv(plan, ranks, [position[stage] for stage in range(len(plan.stages))])


def chain_order(plan: Plan) -> tuple[int, ...]:
    """Stage ids from the first to the last stage of a plan that torch can run.

    Raises:
        PlanError: as :func:`torch_schedule_csv`.
    """
    if plan.copies > 1:
        raise _refusal("has several copies", "copies", 1, plan.copies)
    sizes = sorted({stage.micro_batch for stage in plan.stages})
    if len(sizes) > 1:
        raise _refusal("mixes micro-batch sizes", "micro_batch", "one size for all", sizes)
    if plan.batch_size % sizes[0]:
        got = f"{plan.batch_size} samples in micro-batches of {sizes[0]}"
        raise _refusal("has a short last micro-batch", "batch_size", "a whole number of them", got)
    for index, stage in enumerate(plan.stages):
        where = f"stage {index} ({stage.name})"
        if stage.replicas > 1:
            raise _refusal("replicates a stage", where, "one replica", stage.replicas)
        if not stage.has_backward:
            raise _refusal("has a stage without a backward", where, "a backward", "none")
        if len(plan.out_edges[index]) > 1 or len(plan.in_edges[index]) > 1:
            neighbours = max(len(plan.out_edges[index]), len(plan.in_edges[index]))
            raise _refusal(
                "is not a chain", where, "one edge in and one out", f"{neighbours} edges"
            )
    starts = [index for index, edges in enumerate(plan.in_edges) if not edges]
    if len(starts) != 1:
        raise _refusal("is not a chain", "the stage graph", "one first stage", f"stages {starts}")
    order = [starts[0]]
    while plan.out_edges[order[-1]]:
        order.append(plan.out_edges[order[-1]][0].target)
    return tuple(order)


def _csv(plan: Plan, ranks: range | list[int], number: list[int]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    tasks = plan.schedule.tasks
    for rank in ranks:
        writer.writerow(f"{number[t.stage]}{t.kind}{t.micro_batch}" for t in tasks[rank])
    return out.getvalue()


def _refusal(what: str, where: str, expected: object, got: object) -> PlanError:
    return PlanError(
        f"torch.distributed.pipelining cannot run this plan: it {what}",
        where=where,
        expected=expected,
        got=got,
        fix="Plan a chain with one micro-batch size and without replicas, or run the plan with "
        "graphpipe.Pipeline",
    )
