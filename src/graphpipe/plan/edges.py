"""What stages exchange and read: edges and inputs of a plan, derived from the graph alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from graphpipe.cost.table import CostTable
from graphpipe.errors import PlanError
from graphpipe.graph.cut import StageCut, stage_cut
from graphpipe.graph.model_graph import ModelGraph, Op
from graphpipe.plan.plan import InputSignature
from graphpipe.plan.stage import EdgeTensor, StageEdge


class HasOps(Protocol):
    """A stage, a choice of one, anything that lists ops."""

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of the ops."""
        ...


def gradient_ops(graph: ModelGraph) -> frozenset[str]:
    """Ops that have a backward: a gradient flows into them from the loss.

    In a graph without a loss these are all ops that require a gradient. Otherwise an op whose
    value no loss term depends on, such as an output that is only returned, has none: a single
    process gives its parameters no gradient either.

    An op that writes in place reaches the loss through the memory that it writes to: a reader
    of ``y`` after ``y[:, 0] = x`` names ``y`` and not the write. Ops that share written memory
    are a group.
    """
    if not graph.loss_terms:
        return frozenset(op.name for op in graph.ops if op.requires_grad)
    group_of = {op.name: op.group for op in graph.ops}
    reached = {term.op for term in graph.loss_terms}
    groups = {group_of[name] for name in reached}
    found: set[str] = set()
    for op in reversed(graph.ops):
        written = op.group is not None and op.group in groups and _in_place(op)
        if (op.name in reached or written) and op.requires_grad:
            found.add(op.name)
            reached.update(op.inputs)
            groups.add(op.group)
            groups.update(group_of[name] for name in op.inputs if name in group_of)
    return frozenset(found)


def _in_place(op: Op) -> bool:
    """Whether the operator writes to one of its inputs, by torch's naming (``copy_``)."""
    parts = op.target.split(".")
    return len(parts) > 1 and parts[1].endswith("_")


def cuts_of(graph: ModelGraph, stages: Sequence[HasOps]) -> tuple[StageCut, ...]:
    """The boundary of every stage, after checking that each op is in exactly one.

    Raises:
        PlanError: naming the ops that no stage or several stages hold, or that do not exist.
    """
    known = graph.op_by_name
    owners: dict[str, list[int]] = {op.name: [] for op in graph.ops if not op.prep}
    unknown: list[str] = []
    for number, stage in enumerate(stages):
        for name in stage.ops:
            if name not in known:
                unknown.append(f"{name!r} in stage {number}")
            elif name in owners:
                owners[name].append(number)
    missing = [repr(name) for name, found in owners.items() if not found]
    doubled = [
        f"{name!r} in stages {', '.join(map(str, found))}"
        for name, found in owners.items()
        if len(found) > 1
    ]
    for what, items in (
        ("Stages name ops that the graph does not have", unknown),
        ("Ops of the graph are in no stage", missing),
        ("Ops are in more than one stage, or twice in one", doubled),
    ):
        if items:
            raise PlanError(
                what,
                where=listed(items),
                expected="every op in exactly one stage",
                fix="Plan again for this graph, or mend the stages' lists of ops",
            )
    return tuple(stage_cut(graph, stage.ops) for stage in stages)


def listed(items: Sequence[str], most: int = 5) -> str:
    """The first few items and how many more there are."""
    shown = ", ".join(items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"


def stage_edges(
    graph: ModelGraph, stages: Sequence[HasOps], costs: CostTable | None = None
) -> tuple[StageEdge, ...]:
    """The edges between stages, by source, then target; one for each pair of stages.

    Args:
        graph: Any variant of the graph whose ops the stages divide.
        stages: The stages.
        costs: Source of the messages' bytes; without it they follow from shapes and dtypes.

    Raises:
        PlanError: if an op is missing or doubled.
    """
    return edges_of_cuts(graph, cuts_of(graph, stages), costs)


def edges_of_cuts(
    graph: ModelGraph, cuts: Sequence[StageCut], costs: CostTable | None = None
) -> tuple[StageEdge, ...]:
    """:func:`stage_edges` where the cuts are known."""
    owner = {name: number for number, cut in enumerate(cuts) for name in cut.ops}
    differentiable = gradient_ops(graph)
    index = graph.op_index
    between: dict[tuple[int, int], list[EdgeTensor]] = {}
    for target, cut in enumerate(cuts):
        inside = set(cut.ops)
        for name in cut.reads:
            back = name in differentiable and any(
                graph.ops[reader].name in inside and graph.ops[reader].name in differentiable
                for reader in graph.successors[index[name]]
            )
            tensor = _tensor(graph, graph.op_by_name[name], back, costs)
            between.setdefault((owner[name], target), []).append(tensor)
    return tuple(
        StageEdge(source=source, target=target, tensors=tuple(tensors))
        for (source, target), tensors in sorted(between.items())
    )


def _tensor(graph: ModelGraph, op: Op, gradient: bool, costs: CostTable | None) -> EdgeTensor:
    spec = op.output
    fixed = per_sample = 0.0
    if costs is not None:
        row = graph.op_index[op.name]
        fixed, per_sample = (float(x) for x in costs.output_bytes[row])
        back_fixed, back_per_sample = (float(x) for x in costs.gradient_bytes[row])
    else:
        if spec is not None:
            per_sample = float(spec.nbytes(2) - spec.nbytes(1))
            fixed = float(spec.nbytes(1)) - per_sample
        back_fixed, back_per_sample = fixed, per_sample
    return EdgeTensor(
        name=op.name,
        shape=spec.concrete_shape(1) if spec is not None else (),
        dtype=spec.dtype if spec is not None else "float32",
        rows_per_sample=spec.rows_per_sample if spec is not None else 1,
        has_gradient=gradient,
        bytes_per_sample=per_sample,
        fixed_bytes=fixed,
        gradient_bytes_per_sample=back_per_sample if gradient else 0.0,
        gradient_fixed_bytes=back_fixed if gradient else 0.0,
    )


def input_signatures(graph: ModelGraph, cuts: Sequence[StageCut]) -> tuple[InputSignature, ...]:
    """The graph's inputs, each with the stages that read it."""
    return tuple(
        InputSignature(
            name=item.name,
            path=item.path,
            shape=item.spec.shape,
            dtype=item.spec.dtype,
            per_sample=item.per_sample,
            stages=tuple(s for s, cut in enumerate(cuts) if item.name in cut.inputs),
        )
        for item in graph.inputs
    )
