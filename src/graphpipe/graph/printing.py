"""A model graph as a table for people: ``print(graph)``."""

from __future__ import annotations

from collections.abc import Sequence

from graphpipe.graph.model_graph import ModelGraph, Op, TensorSpec


def graph_text(graph: ModelGraph) -> str:
    """One line per op: name, operator, module, shape (in the batch b), parameters, marks.

    Marks: ``grad`` has a backward, ``prep`` recomputed wherever it is read, ``coupled`` mixes
    the samples of a micro-batch, ``random``, ``group N`` must stay together, ``local`` may not
    be sent to another stage, ``loss`` and ``output`` sinks.
    """
    sinks: dict[str, list[str]] = {}
    for term in graph.loss_terms:
        sign = "-" if term.sign < 0 else ""
        sinks.setdefault(term.op, []).append(f"{sign}loss ({term.reduction})")
        if term.count_op is not None:
            sinks.setdefault(term.count_op, []).append("count")
    for name in graph.outputs:
        sinks.setdefault(name, []).append("output")
    rows = [("op", "operator", "module", "value", "parameters", "")]
    for op in graph.ops:
        rows.append(
            (
                op.name,
                _operator(op),
                op.module,
                shape_text(op.output) if op.output is not None else "-",
                _parameters(op),
                ", ".join([*_marks(op), *sinks.get(op.name, [])]),
            )
        )
    return "\n".join([*_header(graph), "", *_table(rows)])


def shape_text(spec: TensorSpec) -> str:
    """``float32 [b, 8*b, 16]``."""
    return f"{spec.dtype} [{', '.join(str(size).replace(' ', '') for size in spec.shape)}]"


def _header(graph: ModelGraph) -> list[str]:
    trainable = sum(p.numel for p in graph.parameters if p.trainable)
    frozen = sum(p.numel for p in graph.parameters if not p.trainable and not p.is_buffer)
    mode = "training" if graph.training else "evaluation"
    prep = sum(op.prep for op in graph.ops)
    lines = [
        f"{graph.name} ({mode}): {len(graph.ops)} ops, {prep} of them prep, "
        f"{_count(trainable)} trainable and {_count(frozen)} frozen parameters"
    ]
    for item in graph.inputs:
        kind = "" if item.per_sample else ", the same for all samples"
        lines.append(f"  input {item.name} = {item.path}: {shape_text(item.spec)}{kind}")
    lines += [f"  note: {text}" for text in graph.warnings]
    return lines


def _count(number: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= 10 * size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _operator(op: Op) -> str:
    return op.target.removeprefix("aten.").removesuffix(".default")


def _parameters(op: Op) -> str:
    stem = f"{op.module}." if op.module else ""
    return ", ".join(
        f".{name.removeprefix(stem)}" if stem and name.startswith(stem) else name
        for name in op.parameters
    )


def _marks(op: Op) -> list[str]:
    marks = [
        name
        for name, holds in (
            ("grad", op.requires_grad),
            ("prep", op.prep),
            ("coupled", op.coupled),
            ("random", op.random),
        )
        if holds
    ]
    if op.output is not None and not op.crossable and not op.prep:
        marks.append("local")
    if op.group is not None:
        marks.append(f"group {op.group}")
    return marks


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    columns = len(rows[0])
    widths = [max(len(row[i]) for row in rows) for i in range(columns)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return [line.rstrip() for line in lines]
