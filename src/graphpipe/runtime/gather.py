"""Brings together what the ranks hold: outputs in sample order, parameters, measured times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.ranges import copy_range, micro_batch_range
from graphpipe.runtime.executor import TaskRecord
from graphpipe.runtime.rank_program import dtype_of
from graphpipe.runtime.slices import put
from graphpipe.runtime.transport import Eventually, Transport, Wait
from graphpipe.runtime.variant import Variant

_KINDS = ("F", "B", "all_reduce", "optimizer", "step")

Results = Mapping[int, list[tuple[int, int, torch.Tensor]]]


def gather_outputs(
    rank: int,
    transport: Transport,
    variant: Variant,
    leaves: Sequence[torch.Tensor],
    results: Results,
    batch_size: int,
) -> Eventually[list[torch.Tensor]]:
    """The model's outputs for the whole mini-batch, in sample order, on the CPU of every rank.

    Args:
        rank: This rank.
        transport: How it reaches others.
        variant: What ran.
        leaves: The graph inputs (on the meta device where this rank does not read them); an
            output may be one of them.
        results: By output number, this rank's (first sample, samples, value).
        batch_size: Samples of the mini-batch.
    """
    everyone = tuple(range(transport.world_size))
    graph, plan = variant.graph, variant.plan
    needs = [variant.needs(member) for member in everyone]
    out: list[torch.Tensor] = []
    for number, name in enumerate(graph.outputs):
        if name in variant.leaf_numbers:
            given = leaves[variant.leaf_numbers[name]]
            # Only ranks that read it need have its values; where none reads it, all have.
            owner = next((member for member in everyone if name in needs[member]), None)
            if owner is not None:
                value = torch.empty(given.shape, dtype=given.dtype)
                if rank == owner:
                    value.copy_(given)
                yield from _broadcast(rank, transport, everyone, value, owner)
                out.append(value)
            else:
                out.append(given.cpu())
            continue
        spec = graph.op_by_name[name].output
        assert spec is not None
        whole = torch.empty(spec.concrete_shape(batch_size), dtype=dtype_of(spec.dtype))
        stage = next(item for item in plan.stages if name in item.ops)
        rows = spec.rows_per_sample
        mine = {first: value for first, _, value in results.get(number, [])}
        if rows is None:
            # The same for every micro-batch: the first one's serves.
            root = stage.devices[0]
            if rank == root:
                whole.copy_(mine[min(mine)])
            yield from _broadcast(rank, transport, everyone, whole, root)
            out.append(whole)
            continue
        for place, root in enumerate(stage.devices):
            copy, replica = divmod(place, stage.replicas)
            owned = copy_range(copy, plan.copies, batch_size)
            count = -(-len(owned) // stage.micro_batch)
            parts = [
                micro_batch_range(owned, stage.micro_batch, i)
                for i in range(replica, count, stage.replicas)
            ]
            if not parts:
                continue
            length = sum(len(part) for part in parts) * rows
            packed = torch.empty((length, *whole.shape[1:]), dtype=whole.dtype)
            if rank == root:
                torch.cat([mine[part.start].cpu() for part in parts], out=packed)
            yield from _broadcast(rank, transport, everyone, packed, root)
            at = 0
            for part in parts:
                size = len(part) * rows
                whole[part.start * rows : part.start * rows + size] = packed[at : at + size]
                at += size
        out.append(whole)
    return out


def gather_state(
    rank: int,
    transport: Transport,
    graph: ModelGraph,
    holders: Mapping[str, Sequence[int]],
    state: Mapping[str, torch.Tensor],
    to: int | None,
) -> Eventually[dict[str, torch.Tensor]]:
    """Parameters and persistent buffers of the whole model on the CPU, by every name they have.

    Args:
        rank: This rank.
        transport: How it reaches others.
        graph: The graph that lists them.
        holders: By canonical name the ranks that hold it.
        state: What this rank holds.
        to: The rank that gets them (others get an empty dictionary); None: all ranks.
    """
    everyone = tuple(range(transport.world_size))
    out: dict[str, torch.Tensor] = {}
    for item in graph.parameters:
        if not item.persistent:
            continue
        owner = holders[item.name][0]
        value: torch.Tensor | None = None
        if to is None or rank in (owner, to):
            value = torch.empty(item.shape, dtype=dtype_of(item.dtype))
            if rank == owner:
                value.copy_(state[item.name].detach())
        if to is None:
            assert value is not None
            yield from _broadcast(rank, transport, everyone, value, owner)
        elif value is not None and owner != to:
            if rank == owner:
                handle = transport.send(owner, to, value, item.name)
            else:
                handle = transport.receive(owner, to, value, item.name)
            while not handle.poll():
                yield
        if to in (None, rank):
            assert value is not None
            put(out, item, value)
    return out


def gather_records(
    rank: int, transport: Transport, records: Sequence[TaskRecord], start_ns: int, end_ns: int
) -> Eventually[list[tuple[int, TaskRecord]]]:
    """The task times of all ranks, from 0 at each rank's start, as (rank, record).

    A last record of kind ``step`` per rank spans its whole iteration.
    """
    everyone = tuple(range(transport.world_size))
    rows = [
        [_KINDS.index(r.kind), r.stage, r.micro_batch, r.start_ns - start_ns,
         r.end_ns - start_ns]
        for r in records
    ]  # fmt: skip
    rows.append([_KINDS.index("step"), -1, -1, 0, end_ns - start_ns])
    longest = torch.tensor([len(rows)])
    yield from _reduce(rank, transport, everyone, longest, maximum=True)
    table = torch.zeros((transport.world_size, int(longest), 6), dtype=torch.int64)
    for i, row in enumerate(rows):
        table[rank, i, :5] = torch.tensor(row)
        table[rank, i, 5] = 1
    yield from _reduce(rank, transport, everyone, table, maximum=False)
    out: list[tuple[int, TaskRecord]] = []
    for owner, lines in enumerate(table.tolist()):
        for kind, stage, number, start, end, there in lines:
            if there:
                out.append((owner, TaskRecord(_KINDS[kind], stage, number, start, end)))
    return out


def _broadcast(
    rank: int, transport: Transport, group: tuple[int, ...], value: torch.Tensor, root: int
) -> Wait:
    handle = transport.broadcast(rank, group, value, root)
    while not handle.poll():
        yield


def _reduce(
    rank: int,
    transport: Transport,
    group: tuple[int, ...],
    value: torch.Tensor,
    *,
    maximum: bool,
) -> Wait:
    handle = transport.all_reduce(rank, group, value, "max" if maximum else "sum")
    while not handle.poll():
        yield
