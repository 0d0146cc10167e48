"""Time and memory of a stage, and what parameters cost where: from graph and cost table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

from graphpipe.cost.cluster import Cluster
from graphpipe.cost.table import CostTable, ParameterMemory
from graphpipe.errors import InfeasibleError
from graphpipe.graph.cut import StageCut
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import ReduceGroup
from graphpipe.plan.stage import StageMemory, TaskTimes


def task_times(
    graph: ModelGraph,
    costs: CostTable,
    cut: StageCut,
    kind: str,
    micro_batch: int,
    *,
    has_backward: bool,
    recompute: bool,
) -> TaskTimes:
    """Times of one full micro-batch of a stage on one kind of device.

    Raises:
        InfeasibleError: if an op cannot run at this size; it is named with the reason.
    """
    rows = [graph.op_index[name] for name in cut.ops]
    forward, backward = costs.stage_seconds(rows, kind, micro_batch)
    if not (isfinite(forward) and isfinite(backward)):
        inside = set(cut.ops)
        # Between an excluded size and its neighbour nothing runs either.
        item = min(
            (e for e in costs.exclusions if e.op in inside),
            key=lambda e: abs(e.micro_batch - micro_batch),
        )
        raise InfeasibleError(
            f"Op {item.op!r} cannot run with micro-batches of {micro_batch} samples",
            where=graph.op_by_name[item.op].module or item.op,
            got=item.reason,
            fix="Use a smaller micro-batch",
        )
    if not has_backward:
        backward = 0.0
    elif recompute:
        backward += forward
    return TaskTimes(forward_ns=round(forward * 1e9), backward_ns=round(backward * 1e9))


def stage_memory(
    graph: ModelGraph,
    costs: CostTable,
    cut: StageCut,
    micro_batch: int,
    *,
    has_backward: bool,
    recompute: bool,
) -> StageMemory:
    """Bytes on each device that hosts a replica of the stage.

    With recomputation a micro-batch in flight keeps what the stage reads from other stages,
    and the backward brings back what it would have kept otherwise. A stage without a backward
    keeps nothing. What a stage hands on lives until its own backward too (the graph of the
    backward starts at it, and its sends are waited for then), also where no op saves it.
    """
    rows = [graph.op_index[name] for name in cut.ops]
    weights, gradients, optimizer = parameter_bytes(graph, costs.parameter_memory, cut.parameters)
    saved = extra = 0.0
    if has_backward:
        fixed, per_sample = costs.saved_bytes(rows, micro_batch)
        saved = fixed + per_sample * micro_batch
        if recompute:
            read = [graph.op_index[name] for name in cut.reads]
            bytes_read = costs.output_bytes[read].sum(axis=0) if read else (0.0, 0.0)
            extra = saved
            saved = min(saved, float(bytes_read[0]) + float(bytes_read[1]) * micro_batch)
        saved += _handed_on(graph, costs, cut, micro_batch, recompute=recompute)
    work = costs.workspace_bytes[rows]
    workspace = float((work[:, 0] + work[:, 1] * micro_batch).max()) if rows else 0.0
    return StageMemory(
        parameters=round(weights),
        gradients=round(gradients),
        optimizer=round(optimizer),
        saved_per_micro_batch=round(saved),
        recompute=round(extra),
        workspace=round(workspace),
    )


def _handed_on(
    graph: ModelGraph, costs: CostTable, cut: StageCut, micro_batch: int, *, recompute: bool
) -> float:
    """Bytes of a stage's outputs that are not among what its ops save anyhow.

    Views count as if they had memory of their own. Published profiles say themselves what a
    micro-batch keeps.
    """
    if costs.source == "published":
        return 0.0
    kept = set()
    if not recompute:
        kept = {item.id for name in cut.ops for item in graph.op_by_name[name].saves}
    rows = [graph.op_index[name] for name in cut.writes if name not in kept]
    if not rows:
        return 0.0
    fixed, per_sample = costs.output_bytes[rows].sum(axis=0)
    return float(fixed) + float(per_sample) * micro_batch


def parameter_bytes(
    graph: ModelGraph, factors: ParameterMemory, names: Iterable[str]
) -> tuple[float, float, float]:
    """Bytes of weights (and buffers), gradients and optimizer state of some parameters."""
    weights = gradients = optimizer = 0.0
    for name in names:
        item = graph.parameter_by_name[name]
        weights += item.nbytes * (1.0 if item.is_buffer else factors.weight)
        if item.trainable and not item.is_buffer:
            gradients += item.nbytes * factors.gradient
            optimizer += item.nbytes * factors.optimizer
    return weights, gradients, optimizer


def parameters_by_rank(
    cuts: Sequence[StageCut], devices: Sequence[Sequence[int]], world_size: int
) -> tuple[frozenset[str], ...]:
    """Canonical names of the parameters and buffers that each rank holds."""
    held: list[set[str]] = [set() for _ in range(world_size)]
    for cut, ranks in zip(cuts, devices, strict=True):
        for rank in ranks:
            held[rank].update(cut.parameters)
    return tuple(frozenset(names) for names in held)


def reduce_groups(
    graph: ModelGraph, held: Sequence[frozenset[str]], trained: frozenset[str]
) -> tuple[ReduceGroup, ...]:
    """Groups of ranks that share trained parameters, in the order of the graph's parameters.

    One rule for replicas, copies and ties: the gradient of a parameter is summed over all
    ranks that hold it.

    Args:
        graph: The graph.
        held: Names by rank.
        trained: Parameters of stages that have a backward.
    """
    groups: dict[tuple[int, ...], list[str]] = {}
    for item in graph.parameters:
        if item.is_buffer or not item.trainable or item.name not in trained:
            continue
        ranks = tuple(rank for rank, names in enumerate(held) if item.name in names)
        if len(ranks) > 1:
            groups.setdefault(ranks, []).append(item.name)
    return tuple(
        ReduceGroup(
            ranks=ranks,
            parameters=tuple(names),
            nbytes=sum(graph.parameter_by_name[name].nbytes for name in names),
        )
        for ranks, names in groups.items()
    )


def optimizer_times(
    graph: ModelGraph,
    costs: CostTable,
    cluster: Cluster,
    held: Sequence[frozenset[str]],
    trained: frozenset[str],
) -> tuple[int, ...]:
    """Nanoseconds of the optimizer step on each rank, each parameter once."""
    out: list[int] = []
    for rank, names in enumerate(held):
        items = [graph.parameter_by_name[name] for name in names & trained]
        sizes = [item.nbytes for item in items if item.trainable and not item.is_buffer]
        seconds = 0.0
        if sizes:
            kind = cluster.devices[rank].kind
            seconds = costs.device_costs(kind).optimizer_seconds(sum(sizes), len(sizes))
        out.append(round(seconds * 1e9))
    return tuple(out)
