"""The facts that a report page shows, as one JSON-able tree.

The page computes nothing that the plan or the timeline says; it formats and draws. Events
come as columns of integers, starts as gaps to the end before them, so that 64 devices
with 256 micro-batches stay under two megabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from graphpipe.plan.plan import Plan
from graphpipe.plan.stage import Stage, StageEdge
from graphpipe.plan.stage_graph import depth
from graphpipe.planner.compare import ComparisonRow
from graphpipe.simulate.memory import memory_curves
from graphpipe.simulate.timeline import Event, Timeline, Transfer
from graphpipe.simulate.usage import bubble, busiest, device_uses, recompute_ns
from graphpipe.simulate.words import describe, describe_measured, source_of

Json = dict[str, Any]

EVENT_KINDS = ("F", "B", "all_reduce", "optimizer")
"""An event's kind is its position here."""


def report_data(
    plan: Plan,
    timeline: Timeline,
    measured: Timeline | None,
    comparison: Sequence[ComparisonRow],
) -> Json:
    """Everything that the page shows; times in nanoseconds, sizes in bytes."""
    timelines = [_timeline(plan, timeline, "Predicted")]
    if measured is not None:
        timelines.append(_timeline(plan, measured, source_of(measured).capitalize()))
    return {
        "model": plan.model,
        "planner": plan.planner,
        "fingerprint": plan.fingerprint,
        "batch_size": plan.batch_size,
        "copies": plan.copies,
        "world_size": plan.world_size,
        "cluster": plan.cluster.name,
        "builder": plan.schedule.builder,
        "depth": depth(plan),
        "lower_bound_ns": plan.prediction.lower_bound_ns if plan.prediction else 0,
        "idle_devices": plan.idle_devices,
        "notes": plan.notes,
        "stages": [_stage(stage) for stage in plan.stages],
        "edges": [_edge(edge) for edge in plan.edges],
        "inputs": [_input(plan, index) for index in range(len(plan.inputs))],
        "reduce_groups": [
            {"ranks": g.ranks, "parameters": len(g.parameters), "bytes": g.nbytes}
            for g in plan.reduce_groups
        ],
        "devices": [
            {
                "kind": device.kind,
                "node": device.node,
                "memory": device.memory_bytes,
                "static": plan.static_bytes(rank),
            }
            for rank, device in enumerate(plan.cluster.devices)
        ],
        "stages_of_device": plan.stages_of_device,
        "timelines": timelines,
        "words": describe(plan, timeline),
        "words_measured": [] if measured is None else describe_measured(plan, timeline, measured),
        "comparison": [
            _row(row)
            for row in comparison
            # The plan shown is a row of the page anyway.
            if row.variant != "ours" or row.iteration_ns != timeline.iteration_ns
        ],
    }


def _row(row: ComparisonRow) -> Json:
    shown = {"planner", "variant", "iteration_ns", "bubble", "depth", "peak_memory_bytes"}
    return row.model_dump(include={*shown, "search_seconds", "note"})


def _stage(stage: Stage) -> Json:
    memory = stage.memory
    return {
        "name": stage.name,
        "modules": stage.modules,
        "ops": stage.ops,
        "micro_batch": stage.micro_batch,
        "replicas": stage.replicas,
        "devices": stage.devices,
        "block": stage.block,
        "in_flight": stage.in_flight,
        "has_backward": stage.has_backward,
        "recompute": stage.recompute,
        "times": {
            kind: [times.forward_ns, times.backward_ns] for kind, times in stage.times.items()
        },
        "memory": {**memory.model_dump(), "static": memory.static},
    }


def _edge(edge: StageEdge) -> Json:
    return {
        "source": edge.source,
        "target": edge.target,
        "bytes_per_sample": sum(t.bytes_per_sample for t in edge.tensors),
        "fixed_bytes": sum(t.fixed_bytes for t in edge.tensors),
        "gradient_bytes_per_sample": sum(t.gradient_bytes_per_sample for t in edge.tensors),
        "gradient_fixed_bytes": sum(t.gradient_fixed_bytes for t in edge.tensors),
        "tensors": [
            {"name": t.name, "shape": t.shape, "dtype": t.dtype, "gradient": t.has_gradient}
            for t in edge.tensors
        ],
    }


def _input(plan: Plan, index: int) -> Json:
    signature = plan.inputs[index]
    return {
        "path": signature.path or signature.name,
        "shape": signature.shape,
        "dtype": signature.dtype,
        "per_sample": signature.per_sample,
        "stages": signature.stages,
    }


def _timeline(plan: Plan, timeline: Timeline, label: str) -> Json:
    uses = device_uses(plan, timeline)
    curves = memory_curves(plan, timeline) if label == "Predicted" else ()
    return {
        "label": label,
        "iteration_ns": timeline.iteration_ns,
        "bubble": bubble(uses, timeline.iteration_ns),
        "bottleneck": busiest(uses).rank,
        "peak_memory": timeline.peak_memory,
        "peak_in_flight": timeline.peak_in_flight,
        "uses": [asdict(use) for use in uses],
        "events": _event_columns(plan, timeline.events),
        "transfers": _transfer_columns(timeline.transfers),
        "memory": [
            {"times": _gaps([at for at, _ in steps]), "bytes": _gaps([size for _, size in steps])}
            for steps in curves
        ],
    }


def _event_columns(plan: Plan, events: Sequence[Event]) -> Json:
    ordered = sorted(events, key=lambda e: (e.rank, e.start_ns, e.end_ns))
    return {
        "rank": _gaps([e.rank for e in ordered]),
        "kind": [EVENT_KINDS.index(e.kind) for e in ordered],
        "stage": [e.stage for e in ordered],
        "micro_batch": [e.micro_batch for e in ordered],
        "gap": _starts_after_ends([(e.start_ns, e.end_ns) for e in ordered]),
        "length": [e.end_ns - e.start_ns for e in ordered],
        "recompute": [recompute_ns(plan, e) for e in ordered],
    }


def _transfer_columns(transfers: Sequence[Transfer]) -> Json:
    ordered = sorted(transfers, key=lambda t: (t.start_ns, t.end_ns, t.source, t.target))
    return {
        "source": [t.source for t in ordered],
        "target": [t.target for t in ordered],
        "kind": [EVENT_KINDS.index(t.kind) for t in ordered],
        "edge": [t.edge for t in ordered],
        "start": _gaps([t.start_ns for t in ordered]),
        "length": [t.end_ns - t.start_ns for t in ordered],
        "bytes": [t.nbytes for t in ordered],
        "first_sample": [t.first_sample for t in ordered],
        "samples": [t.last_sample - t.first_sample + 1 for t in ordered],
    }


def _gaps(values: Sequence[int]) -> list[int]:
    """Differences of neighbours, the first from zero: short numbers instead of long ones."""
    return [value - before for before, value in zip([0, *values], values, strict=False)]


def _starts_after_ends(spans: Sequence[tuple[int, int]]) -> list[int]:
    ends = [0, *(end for _, end in spans)]
    return [start - before for before, (start, _) in zip(ends, spans, strict=False)]
