"""``UnitGraph``: what the planner searches on.

Units (small sets of ops that stay together) with their costs as plain numbers. Everything
that a search asks about a set of units (time, memory, bytes across an edge) is answered
here, from the graph and the cost table, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from graphpipe.cost.table import CostTable
from graphpipe.graph.coarsen import coarsen
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.edges import gradient_ops
from graphpipe.plan.names import stage_names


class UnitTensor(NamedTuple):
    """A tensor that leaves its unit: bytes fixed and per sample, forward and gradient."""

    producer: int
    consumers: tuple[int, ...]
    op: int
    forward_fixed: float
    forward_bytes: float
    backward_fixed: float
    backward_bytes: float
    has_gradient: bool
    batched: bool


class StageFacts(NamedTuple):
    """What a set of units is, whatever its micro-batch size.

    Bytes: ``static`` (weights, gradients, optimizer state), ``gradient`` (what a replica has to
    reduce), ``saved_*`` (kept per micro-batch in flight: fixed and per sample), ``input_*`` (the
    same for a stage that recomputes), ``workspace_*`` (transient). ``gradient_tensors`` is the
    number of trainable parameters.
    """

    has_backward: bool
    static: float
    gradient: float
    saved_fixed: float
    saved_bytes: float
    input_fixed: float
    input_bytes: float
    workspace_fixed: float
    workspace_bytes: float
    gradient_tensors: int


@dataclass(eq=False)
class UnitGraph:
    """Units in a topological order.

    Attributes:
        graph: The graph.
        costs: Its costs.
        members: Positions in ``graph.ops`` of each unit's ops (prep ops are in none).
        coupled: Whether the unit mixes the samples of its micro-batch.
    """

    graph: ModelGraph
    costs: CostTable
    members: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        self._times: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
        self._facts: dict[tuple[int, ...], StageFacts] = {}
        self._optimizer: dict[str, tuple[float, ...]] = {}
        self._order = np.array([op for unit in self.members for op in unit], dtype=np.intp)
        sizes = [len(unit) for unit in self.members]
        self._starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.intp)

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def unit_of_op(self) -> dict[int, int]:
        return {op: u for u, ops in enumerate(self.members) for op in ops}

    @cached_property
    def coupled(self) -> tuple[bool, ...]:
        return tuple(any(self.graph.ops[op].coupled for op in ops) for ops in self.members)

    @cached_property
    def has_backward(self) -> tuple[bool, ...]:
        return tuple(any(self._gets_gradient[op] for op in ops) for ops in self.members)

    @cached_property
    def _gets_gradient(self) -> tuple[bool, ...]:
        """By op, as the plan has it: what the loss does not depend on gets no gradient."""
        found = gradient_ops(self.graph)
        return tuple(op.name in found for op in self.graph.ops)

    @cached_property
    def least_samples(self) -> tuple[int, ...]:
        """Samples below which each unit cannot run (batch normalisation of one value)."""
        least = [1] * len(self)
        for condition in self.graph.batch_conditions:
            u = self.unit_of_op.get(self.graph.op_index[condition.op])
            if u is not None:
                least[u] = max(least[u], condition.min_samples)
        return tuple(least)

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        owner = self.unit_of_op
        out = []
        for u, ops in enumerate(self.members):
            found = {owner[p] for op in ops for p in self.graph.predecessors[op] if p in owner}
            found.discard(u)
            out.append(tuple(sorted(found)))
        return tuple(out)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        out: list[list[int]] = [[] for _ in self.members]
        for u, sources in enumerate(self.predecessors):
            for v in sources:
                out[v].append(u)
        return tuple(tuple(items) for items in out)

    @cached_property
    def tensors(self) -> tuple[UnitTensor, ...]:
        """Tensors read outside their unit, by producer."""
        owner = self.unit_of_op
        out: list[UnitTensor] = []
        for u, ops in enumerate(self.members):
            for op in ops:
                readers = {owner[s] for s in self.graph.successors[op] if s in owner} - {u}
                if not readers:
                    continue
                record = self.graph.ops[op]
                gradient = self._gets_gradient[op] and any(
                    self.has_backward[reader] for reader in readers
                )
                sent, back = self.costs.output_bytes[op], self.costs.gradient_bytes[op]
                batched = record.output is None or record.output.rows_per_sample is not None
                out.append(
                    UnitTensor(
                        u,
                        tuple(sorted(readers)),
                        op,
                        float(sent[0]),
                        float(sent[1]),
                        float(back[0]) if gradient else 0.0,
                        float(back[1]) if gradient else 0.0,
                        gradient,
                        batched,
                    )
                )
        return tuple(out)

    def times(self, kind: str, micro_batch: int) -> tuple[list[int], list[int]]:
        """Forward and backward nanoseconds of every unit for one micro-batch.

        A size that a unit cannot run at gives ``IMPOSSIBLE_NS``.
        """
        key = (kind, micro_batch)
        found = self._times.get(key)
        if found is None:
            factors = self.costs.corrections.get(kind, (1.0, 1.0))
            rows = []
            for seconds, factor in zip(
                self.costs.op_seconds(kind, micro_batch), factors, strict=True
            ):
                sums = np.add.reduceat(seconds[self._order], self._starts) * (factor * 1e9)
                rows.append([int(x) for x in np.minimum(np.rint(sums), IMPOSSIBLE_NS)])
            for u, least in enumerate(self.least_samples):
                if micro_batch < least:
                    rows[0][u] = IMPOSSIBLE_NS
            found = self._times[key] = (rows[0], rows[1])
        return found

    @cached_property
    def _own(self) -> list[list[float]]:
        """Per unit: static, gradient, saved fixed/per sample of what only it holds; workspace
        fixed/per sample; trainable parameters."""
        costs, graph = self.costs, self.graph
        holders: dict[int, set[int]] = {}
        users: dict[str, set[int]] = {}
        for u, ops in enumerate(self.members):
            for op in ops:
                for item in costs.saved[op]:
                    holders.setdefault(item, set()).add(u)
                for name in graph.ops[op].parameters:
                    users.setdefault(name, set()).add(u)
        self._shared_storages: list[list[int]] = [[] for _ in self.members]
        self._shared_parameters: list[list[str]] = [[] for _ in self.members]
        rows = [[0.0] * 7 for _ in self.members]
        for item, units in holders.items():
            for u in units:
                if len(units) == 1:
                    rows[u][2] += float(costs.storages[item, 0])
                    rows[u][3] += float(costs.storages[item, 1])
                else:
                    self._shared_storages[u].append(item)
        for name, units in users.items():
            static, gradient = self._parameter_bytes(name)
            for u in units:
                if len(units) == 1:
                    rows[u][0] += static
                    rows[u][1] += gradient
                    rows[u][6] += gradient > 0
                else:
                    self._shared_parameters[u].append(name)
        for u, ops in enumerate(self.members):
            work = costs.workspace_bytes[list(ops)].max(axis=0)
            rows[u][4], rows[u][5] = float(work[0]), float(work[1])
        return rows

    def _parameter_bytes(self, name: str) -> tuple[float, float]:
        """Bytes that a device holds for a parameter, and bytes of its gradient."""
        parameter = self.graph.parameter_by_name[name]
        factors = self.costs.parameter_memory
        if parameter.is_buffer:
            return float(parameter.nbytes), 0.0
        if not parameter.trainable:
            return parameter.nbytes * factors.weight, 0.0
        total = factors.weight + factors.gradient + factors.optimizer
        return parameter.nbytes * total, float(parameter.nbytes)

    @cached_property
    def static_bytes(self) -> tuple[float, ...]:
        """Static bytes of each unit alone."""
        return tuple(self.facts((u,)).static for u in range(len(self)))

    @cached_property
    def gradient_bytes(self) -> tuple[float, ...]:
        """Bytes of trainable parameters of each unit alone."""
        return tuple(self.facts((u,)).gradient for u in range(len(self)))

    def optimizer_ns(self, kind: str) -> tuple[float, ...]:
        """Nanoseconds of the optimizer step of each unit alone, on a kind of device."""
        found = self._optimizer.get(kind)
        if found is None:
            costs = self.costs.device_costs(kind)
            facts = [self.facts((u,)) for u in range(len(self))]
            found = self._optimizer[kind] = tuple(
                1e9 * costs.optimizer_seconds(f.gradient, f.gradient_tensors) for f in facts
            )
        return found

    def facts(self, units: tuple[int, ...]) -> StageFacts:
        """Facts of a stage of these units (ascending)."""
        found = self._facts.get(units)
        if found is None:
            found = self._facts[units] = self._compute_facts(units)
        return found

    def _compute_facts(self, units: tuple[int, ...]) -> StageFacts:
        own = self._own
        static = gradient = saved_fixed = saved = work_fixed = work = 0.0
        storages: set[int] = set()
        parameters: set[str] = set()
        backward = False
        tensors = 0.0
        for u in units:
            row = own[u]
            static += row[0]
            gradient += row[1]
            saved_fixed += row[2]
            saved += row[3]
            work_fixed = max(work_fixed, row[4])
            work = max(work, row[5])
            tensors += row[6]
            storages.update(self._shared_storages[u])
            parameters.update(self._shared_parameters[u])
            backward = backward or self.has_backward[u]
        for item in storages:
            saved_fixed += float(self.costs.storages[item, 0])
            saved += float(self.costs.storages[item, 1])
        for name in parameters:
            one, two = self._parameter_bytes(name)
            static += one
            gradient += two
            tensors += two > 0
        inside = set(units)
        input_fixed = inputs = 0.0
        for t in {index for u in units for index in self._read_by[u]}:
            tensor = self.tensors[t]
            if tensor.producer not in inside:
                input_fixed += tensor.forward_fixed
                inputs += tensor.forward_bytes
        # What a stage hands on lives until its own backward, whether or not an op saves it.
        for t in {index for u in units for index in self._made_by[u]}:
            tensor = self.tensors[t]
            if inside.issuperset(tensor.consumers):
                continue
            input_fixed += tensor.forward_fixed
            inputs += tensor.forward_bytes
            if inside.isdisjoint(self._savers[t]):
                saved_fixed += tensor.forward_fixed
                saved += tensor.forward_bytes
        if not backward:
            saved_fixed = saved = input_fixed = inputs = 0.0
        return StageFacts(
            backward,
            static,
            gradient,
            saved_fixed,
            saved,
            input_fixed,
            inputs,
            work_fixed,
            work,
            int(tensors),
        )

    @cached_property
    def _read_by(self) -> list[list[int]]:
        out: list[list[int]] = [[] for _ in self.members]
        for index, tensor in enumerate(self.tensors):
            for u in tensor.consumers:
                out[u].append(index)
        return out

    @cached_property
    def _made_by(self) -> list[list[int]]:
        """By unit its tensors that others read; none where a profile says what is kept."""
        out: list[list[int]] = [[] for _ in self.members]
        if self.costs.source != "published":
            for index, tensor in enumerate(self.tensors):
                out[tensor.producer].append(index)
        return out

    @cached_property
    def _savers(self) -> list[frozenset[int]]:
        """By tensor the units whose ops save it for their backward."""
        saving: dict[str, set[int]] = {}
        for u, ops in enumerate(self.members):
            for op in ops:
                for item in self.graph.ops[op].saves:
                    saving.setdefault(item.id, set()).add(u)
        return [
            frozenset(saving.get(self.graph.ops[tensor.op].name, ())) for tensor in self.tensors
        ]

    def name(self, units: Iterable[int]) -> str:
        """What a stage of these units is called."""
        ops = [self.graph.ops[op].name for u in units for op in self.members[u]]
        return stage_names(self.graph, [ops])[0]


IMPOSSIBLE_NS = 10**15
"""Time of a unit at a size that it cannot run at: no candidate with it is ever chosen."""


def build_units(
    graph: ModelGraph,
    costs: CostTable,
    kinds: Sequence[str],
    *,
    micro_batch: int,
    parts: int = 128,
    together: Iterable[Iterable[int]] = (),
    apart: dict[int, int] | None = None,
) -> UnitGraph:
    """Coarsens a graph into units of at most 1/``parts`` of the work or the memory each.

    Args:
        graph: The graph.
        costs: Its costs.
        kinds: Kinds of device in the cluster; a unit's share is its largest over them.
        micro_batch: The size at which times are compared, samples.
        parts: The grain; larger is finer.
        together: Sets of op positions that stay in one unit.
        apart: Labels of op positions; differently labelled ops are never merged.
    """
    share = np.zeros(len(graph.ops))
    for kind in kinds:
        forward, backward = costs.op_seconds(kind, micro_batch)
        total = np.where(np.isfinite(forward + backward), forward + backward, 0.0)
        if total.sum() > 0:
            share = np.maximum(share, total / total.sum())
    memory = np.zeros(len(graph.ops))
    for i, op in enumerate(graph.ops):
        memory[i] = sum(graph.parameter_by_name[name].nbytes for name in op.parameters)
    if memory.sum() > 0:
        share = np.maximum(share, memory / memory.sum())
    sent = costs.output_bytes[:, 0] + costs.output_bytes[:, 1] * micro_batch
    members = coarsen(
        graph,
        [float(x) for x in share],
        grain=1.0 / parts,
        edge_bytes=[float(x) for x in sent],
        together=together,
        apart=apart,
    )
    return UnitGraph(graph, costs, members)
