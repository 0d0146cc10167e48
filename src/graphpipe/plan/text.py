"""A plan as text: a table that a person understands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphpipe.plan.stage_graph import depth
from graphpipe.units import format_bytes, format_count, format_ns

if TYPE_CHECKING:
    from graphpipe.plan.plan import Plan
    from graphpipe.plan.stage import Stage, StageEdge

_UNLIMITED_BYTES = 2**60
"""Graph files that say nothing of memory give devices more than this."""
_LONGEST = 44


def render(plan: Plan) -> str:
    """Stages with modules, devices, sizes, times and memory; edges; what bounds the iteration."""
    parts = ["\n".join(_headline(plan)), _table(_stage_rows(plan))]
    if plan.edges:
        parts.append(_table(_edge_rows(plan)))
    parts.append("\n".join(_closing(plan)))
    return "\n\n".join(part for part in parts if part)


def _headline(plan: Plan) -> list[str]:
    used = plan.world_size - len(plan.idle_devices)
    copies = f", {plan.copies} copies" if plan.copies > 1 else ""
    by = f" by {plan.planner}" if plan.planner else ""
    order = plan.schedule.builder or ("searched" if plan.planner else "given")
    lines = [
        f"Plan for {plan.model or 'a model'}{by}: {format_count(len(plan.stages), 'stage')} on "
        f"{used} of {format_count(plan.world_size, 'device')}{copies}, mini-batch "
        f"{format_count(plan.batch_size, 'sample')}, schedule {order}"
    ]
    p = plan.prediction
    if p is None:
        lines.append(f"Not simulated; depth {depth(plan)}")
        return lines
    rate = plan.batch_size / (p.iteration_ns / 1e9) if p.iteration_ns else 0.0
    line = f"Iteration {format_ns(p.iteration_ns, 3)} ({rate:,.1f} samples/s), depth {p.depth}"
    line += f", bubble {p.bubble:.1%}"
    if p.all_reduce_ns:
        line += f", all-reduce {format_ns(p.all_reduce_ns, 3)}"
    if p.optimizer_ns:
        line += f", optimizer {format_ns(p.optimizer_ns, 3)}"
    lines.append(line)
    if p.lower_bound_ns:
        gap = p.iteration_ns / p.lower_bound_ns - 1
        lines.append(f"No plan can be faster than {format_ns(p.lower_bound_ns, 3)}: gap {gap:.1%}")
    return lines


def _stage_rows(plan: Plan) -> list[list[str]]:
    rows = [
        ["#", "stage", "modules", "devices", "b", "r", "k", "W", "forward", "backward", "memory"]
    ]
    for number, stage in enumerate(plan.stages):
        rows.append(
            [
                str(number),
                shorten(stage.name),
                shorten(", ".join(stage.modules)) or format_count(len(stage.ops), "op"),
                ranks_text(stage.devices),
                str(stage.micro_batch),
                str(stage.replicas),
                str(stage.block),
                str(stage.in_flight),
                _times(stage, "forward"),
                _times(stage, "backward"),
                _memory(plan, stage),
            ]
        )
    return rows


def _times(stage: Stage, which: str) -> str:
    if which == "backward" and not stage.has_backward:
        return "none"
    if not stage.times:
        return "-"
    values = sorted(
        {t.forward_ns if which == "forward" else t.backward_ns for t in stage.times.values()}
    )
    text = format_ns(values[0], 3)
    if len(values) > 1:
        text += f" to {format_ns(values[-1], 3)}"
    if which == "backward" and stage.recompute:
        text += " (recomputes)"
    return text


def _memory(plan: Plan, stage: Stage) -> str:
    """The fullest of the stage's devices, everything on it, against its capacity."""
    p = plan.prediction
    if p is None or not p.peak_memory:
        held = -(-stage.in_flight // (stage.micro_batch * stage.replicas))
        need = stage.memory.static + held * stage.memory.saved_per_micro_batch
        return f"about {format_bytes(need, 3)}" if need else "-"
    share, rank = max(
        (p.peak_memory[rank] / plan.cluster.devices[rank].memory_bytes, rank)
        for rank in stage.devices
    )
    room = plan.cluster.devices[rank].memory_bytes
    if room > _UNLIMITED_BYTES:
        return f"{format_bytes(p.peak_memory[rank], 3)}, no limit"
    return f"{format_bytes(p.peak_memory[rank], 3)} of {format_bytes(room, 3)} ({share:.0%})"


def _edge_rows(plan: Plan) -> list[list[str]]:
    rows = [["edge", "", "a sample forward", "a sample back", "tensors"]]
    for edge in plan.edges:
        rows.append(
            [
                f"{edge.source} -> {edge.target}",
                shorten(f"{plan.stages[edge.source].name} -> {plan.stages[edge.target].name}"),
                edge_bytes(edge, gradient=False),
                edge_bytes(edge, gradient=True) if edge.has_gradient else "none",
                shorten(", ".join(tensor.name for tensor in edge.tensors)),
            ]
        )
    return rows


def edge_bytes(edge: StageEdge, *, gradient: bool) -> str:
    """Bytes that pass over an edge for a sample, and fixed bytes for a micro-batch."""
    if gradient:
        per_sample = sum(t.gradient_bytes_per_sample for t in edge.tensors)
        fixed = sum(t.gradient_fixed_bytes for t in edge.tensors)
    else:
        per_sample = sum(t.bytes_per_sample for t in edge.tensors)
        fixed = sum(t.fixed_bytes for t in edge.tensors)
    text = format_bytes(per_sample, 3)
    return f"{text} + {format_bytes(fixed, 3)} a micro-batch" if fixed else text


def _closing(plan: Plan) -> list[str]:
    lines: list[str] = []
    loads = [
        (_load(plan, rank), rank) for rank in range(plan.world_size) if plan.stages_of_device[rank]
    ]
    load, rank = max(loads, key=lambda item: (item[0], -item[1]))
    if load:
        names = " and ".join(repr(plan.stages[s].name) for s in plan.stages_of_device[rank])
        lines.append(
            f"Most compute: device {rank} with {names}, {format_ns(round(load), 3)} a sample"
        )
    shared = [r for r in range(plan.world_size) if len(plan.stages_of_device[r]) > 1]
    if shared:
        lines.append(f"Devices with several stages: {ranks_text(shared)}")
    if plan.idle_devices:
        lines.append(f"Idle devices: {ranks_text(plan.idle_devices)}")
    lines += [f"Note: {note}" for note in plan.notes]
    return lines


def _load(plan: Plan, rank: int) -> float:
    """Time per sample of a device: nanoseconds over its stages and the samples of its copy."""
    kind = plan.cluster.devices[rank].kind
    total = 0.0
    for s in plan.stages_of_device[rank]:
        stage = plan.stages[s]
        if kind in stage.times:
            t = stage.times[kind]
            total += (t.forward_ns + t.backward_ns) / (stage.micro_batch * stage.replicas)
    return total


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side; numbers to the right where every row has one."""
    columns = list(zip(*rows, strict=True))
    lines: list[str] = []
    widths = [max(len(cell) for cell in column) for column in columns]
    right = [all(cell[:1].isdigit() for cell in column[1:]) and len(rows) > 1 for column in columns]
    for at, row in enumerate(rows):
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
        if at == 0:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)


def shorten(text: str) -> str:
    """``text``, with its middle left out where it is long."""
    if len(text) <= _LONGEST:
        return text
    half = (_LONGEST - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def ranks_text(ranks: Sequence[int]) -> str:
    """``0-3, 7``."""
    groups: list[list[int]] = []
    for rank in ranks:
        if groups and groups[-1][-1] == rank - 1:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return ", ".join(str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups)
