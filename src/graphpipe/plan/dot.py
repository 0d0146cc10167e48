"""A plan's stage graph in the DOT language of Graphviz."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphpipe.plan.text import edge_bytes, ranks_text
from graphpipe.units import format_ns

if TYPE_CHECKING:
    from graphpipe.plan.plan import Plan


def to_dot(plan: Plan) -> str:
    """Stages as boxes with devices, sizes and times; edges with bytes a sample."""
    lines = [
        "digraph plan {",
        "  rankdir=TB;",
        '  node [shape=box, style="rounded,filled", fillcolor="#eef3f8", fontname="sans-serif"];',
        '  edge [fontname="sans-serif", fontsize=10];',
    ]
    for number, stage in enumerate(plan.stages):
        label = [
            f"{number}: {stage.name}",
            f"devices {ranks_text(stage.devices)}",
            f"b = {stage.micro_batch}, r = {stage.replicas}, W = {stage.in_flight}",
        ]
        for kind, times in sorted(stage.times.items()):
            back = format_ns(times.backward_ns, 3) if stage.has_backward else "none"
            label.append(f"{kind}: {format_ns(times.forward_ns, 3)} + {back}")
        style = "" if stage.has_backward else ', fillcolor="#f2f2f2", color="#888888"'
        lines.append(f'  s{number} [label="{_escaped(label)}"{style}];')
    for edge in plan.edges:
        text = edge_bytes(edge, gradient=False)
        style = "" if edge.has_gradient else ", style=dashed"
        lines.append(f'  s{edge.source} -> s{edge.target} [label="{text}"{style}];')
    return "\n".join([*lines, "}"]) + "\n"


def _escaped(rows: list[str]) -> str:
    return "\\n".join(
        row.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") for row in rows
    )
