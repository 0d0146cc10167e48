"""Compiles a rank's action list into a :class:`~graphpipe.runtime.rank_program.RankProgram`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphpipe.plan.actions import Action
from graphpipe.plan.messages import Message, overlaps
from graphpipe.plan.ranges import SampleRange, micro_batch_range
from graphpipe.plan.schedule import Task
from graphpipe.plan.stage import EdgeTensor, Stage, StageEdge
from graphpipe.runtime.rank_program import (
    BackwardTask,
    BufferSpec,
    Fill,
    ForwardTask,
    GraphInterface,
    InputArgument,
    LossOutput,
    Part,
    Piece,
    RankProgram,
    SlotArgument,
    StageInterface,
    tensor_spec,
)


class Compiler:
    """Compiles the action list of one rank.

    Args:
        rank: The rank.
        stages: All stages of the plan (micro-batch sizes, replicas, devices).
        edges: All edges, with the tensors of this variant of the graph.
        interfaces: Of every stage that this rank hosts, by stage id.
        graph: Inputs, loss terms and outputs of the graph.
        owned: The samples of the copy that this rank belongs to.
        copy: Number of that copy.
        training: Whether gradients go back at all.
    """

    def __init__(
        self,
        rank: int,
        stages: Sequence[Stage],
        edges: Sequence[StageEdge],
        interfaces: Mapping[int, StageInterface],
        graph: GraphInterface,
        owned: SampleRange,
        copy: int,
        *,
        training: bool = True,
    ) -> None:
        self._rank = rank
        self._stages = stages
        self._edges = edges
        self._interfaces = interfaces
        self._graph = graph
        self._owned = owned
        self._copy = copy
        self._training = training
        self._specs: list[BufferSpec] = []
        self._forward_slots: dict[tuple[int, int, int], int] = {}
        self._gradient_slots: dict[tuple[int, int, int], int] = {}
        self._piece_slots: dict[tuple[int, int, int], int] = {}
        self._overlaps = [
            overlaps(len(owned), stages[e.source].micro_batch, stages[e.target].micro_batch)
            for e in edges
        ]

    def compile(self, actions: Sequence[Action], table: Sequence[Message]) -> RankProgram:
        """The executable form of ``actions``; ``table`` holds the messages they name."""
        steps: list[tuple[str, Any]] = []
        last_backward: dict[int, int] = {}
        tasks = 0
        for kind, task, number in actions:
            if kind == "run":
                tasks += 1
                if task.kind == "F":
                    steps.append(("F", self._forward(task)))
                else:
                    last_backward[task.stage] = len(steps)
                    steps.append(("B", self._backward(task)))
            elif kind == "send":
                message = table[number]
                steps.append(("SEND", (number, message.target, self._parts(message))))
            elif kind == "recv":
                message = table[number]
                steps.append(("RECV", (number, message.source, self._fills(message))))
            else:
                steps.append(("WAIT", number))
        return RankProgram(
            rank=self._rank,
            samples=self._owned,
            slots=len(self._specs),
            steps=tuple(steps),
            specs=tuple(self._specs),
            tasks=tasks,
            last_backward=last_backward,
        )

    def _range(self, stage: int, micro_batch: int) -> SampleRange:
        """The samples of the mini-batch that a task of this copy covers."""
        return micro_batch_range(self._owned, self._stages[stage].micro_batch, micro_batch)

    def _here(self, stage: int, micro_batch: int) -> bool:
        """Whether this rank runs that micro-batch of the stage."""
        return self._stages[stage].device_of(self._copy, micro_batch) == self._rank

    def _new_slot(self, spec: BufferSpec) -> int:
        self._specs.append(spec)
        return len(self._specs) - 1

    def _forward_slot(self, edge: int, tensor: int, micro_batch: int) -> int:
        """Slot of an edge's tensor for a micro-batch of the consumer."""
        key = (edge, tensor, micro_batch)
        if key not in self._forward_slots:
            item = self._edges[edge]
            spec = tensor_spec(item.tensors[tensor], len(self._range(item.target, micro_batch)))
            self._forward_slots[key] = self._new_slot(spec)
        return self._forward_slots[key]

    def _gradient_slot(self, edge: int, tensor: int, producer: int, consumer: int) -> int:
        """Slot of the gradient that an edge gives back to a micro-batch of the producer.

        A tensor without a batch dimension gets one from each consumer micro-batch.
        """
        item = self._edges[edge]
        fixed = item.tensors[tensor].rows_per_sample is None
        slots = self._piece_slots if fixed else self._gradient_slots
        key = (edge, tensor, consumer if fixed else producer)
        if key not in slots:
            spec = tensor_spec(item.tensors[tensor], len(self._range(item.source, producer)))
            slots[key] = self._new_slot(spec)
        return slots[key]

    def has_gradient(self, edge: int, tensor: int) -> bool:
        """Whether the gradient of an edge's tensor goes back to its producer."""
        item = self._edges[edge]
        return (
            self._training
            and item.tensors[tensor].has_gradient
            and self._stages[item.source].has_backward
            and self._stages[item.target].has_backward
        )

    def _arguments_from_edges(self, stage: int) -> dict[str, tuple[int, int]]:
        """By name, (edge, tensor) of everything that a stage gets from other stages."""
        return {
            tensor.name: (e, t)
            for e, edge in enumerate(self._edges)
            if edge.target == stage
            for t, tensor in enumerate(edge.tensors)
        }

    def _gradient_numbers(self, stage: int) -> dict[tuple[int, int], int]:
        """Numbers the arguments of a stage that get a gradient, by (edge, tensor)."""
        sources = self._arguments_from_edges(stage)
        names = self._interfaces[stage].inputs
        wanted = [sources[name] for name in names if name in sources]
        return {
            pair: number
            for number, pair in enumerate(pair for pair in wanted if self.has_gradient(*pair))
        }

    def _forward(self, task: Task) -> ForwardTask:
        stage, number = task.stage, task.micro_batch
        samples = self._range(stage, number)
        interface = self._interfaces[stage]
        sources = self._arguments_from_edges(stage)
        arguments: list[InputArgument | SlotArgument] = []
        for name in interface.inputs:
            if name in sources:
                e, t = sources[name]
                slot = self._forward_slot(e, t, number)
                arguments.append(SlotArgument(slot, self.has_gradient(e, t)))
                continue
            leaf, per_sample = self._graph.leaves[name]
            if per_sample is None:
                arguments.append(InputArgument(leaf, 0, -1))
            else:
                arguments.append(
                    InputArgument(leaf, samples.start * per_sample, len(samples) * per_sample)
                )
        place = {name: i for i, name in enumerate(interface.outputs)}
        handed: dict[int, BufferSpec] = {}
        pieces: list[Piece] = []
        for e, edge in enumerate(self._edges):
            if edge.source != stage:
                continue
            for tensor in edge.tensors:
                handed[place[tensor.name]] = tensor_spec(tensor, len(samples))
            for source, target, start, stop, first in self._overlaps[e]:
                if source != number or not self._here(edge.target, target):
                    continue
                for t, tensor in enumerate(edge.tensors):
                    if tensor.rows_per_sample is None and not first:
                        continue
                    slot = self._forward_slot(e, t, target)
                    pieces.append(
                        self._piece(
                            place[tensor.name], tensor, slot, SampleRange(start, stop),
                            number * self._stages[stage].micro_batch, len(samples),
                            target * self._stages[edge.target].micro_batch,
                        )
                    )  # fmt: skip
        return ForwardTask(
            task=task,
            stage=stage,
            samples=samples,
            arguments=tuple(arguments),
            handed_on=tuple(sorted(handed.items())),
            pieces=tuple(pieces),
            losses=self._losses(interface),
            results=tuple(
                (place[name], number)
                for name in interface.outputs
                for number in self._graph.results.get(name, ())
            ),
        )

    def _backward(self, task: Task) -> BackwardTask:
        stage, number = task.stage, task.micro_batch
        interface = self._interfaces[stage]
        place = {name: i for i, name in enumerate(interface.outputs)}
        sources: dict[int, list[int]] = {}
        for e, edge in enumerate(self._edges):
            if edge.source != stage:
                continue
            for source, target, _, _, first in self._overlaps[e]:
                if source != number:
                    continue
                for t, tensor in enumerate(edge.tensors):
                    if not self.has_gradient(e, t):
                        continue
                    if tensor.rows_per_sample is None and not first:
                        continue
                    slots = sources.setdefault(place[tensor.name], [])
                    slot = self._gradient_slot(e, t, number, target)
                    if slot not in slots:
                        slots.append(slot)
        numbers = self._gradient_numbers(stage)
        names = {pair: name for name, pair in self._arguments_from_edges(stage).items()}
        samples = self._range(stage, number)
        pieces: list[Piece] = []
        for (e, t), value in numbers.items():
            edge = self._edges[e]
            tensor = edge.tensors[t]
            for source, target, start, stop, first in self._overlaps[e]:
                if target != number or not self._here(edge.source, source):
                    continue
                if tensor.rows_per_sample is None and not first:
                    continue
                pieces.append(
                    self._piece(
                        value, tensor, self._gradient_slot(e, t, source, target),
                        SampleRange(start, stop),
                        number * self._stages[stage].micro_batch, len(samples),
                        source * self._stages[edge.source].micro_batch,
                    )
                )  # fmt: skip
        return BackwardTask(
            task=task,
            stage=stage,
            samples=samples,
            sources=tuple((value, tuple(slots)) for value, slots in sorted(sources.items())),
            losses=self._losses(interface),
            arguments=tuple(interface.inputs.index(names[pair]) for pair in numbers),
            pieces=tuple(pieces),
        )

    def _losses(self, interface: StageInterface) -> tuple[LossOutput, ...]:
        place = {name: i for i, name in enumerate(interface.outputs)}
        counts = self._graph.counts
        return tuple(
            LossOutput(place[name], term, place[counts[term]] if term in counts else -1)
            for name in interface.outputs
            for term in self._graph.terms.get(name, ())
        )

    def _piece(
        self,
        value: int,
        tensor: EdgeTensor,
        slot: int,
        part: SampleRange,
        value_first: int,
        value_samples: int,
        slot_first: int,
    ) -> Piece:
        """The piece that carries samples ``part`` (all samples numbered within the copy)."""
        rows = tensor.rows_per_sample
        if rows is None:
            return Piece(value, -1, -1, slot, -1)
        count = len(part) * rows
        row = (part.start - value_first) * rows
        direct = count == self._specs[slot].shape[0]
        return Piece(
            value,
            -1 if len(part) == value_samples else row,
            count,
            slot,
            -1 if direct else (part.start - slot_first) * rows,
        )

    def _parts(self, message: Message) -> tuple[Part, ...]:
        """What a message that this rank sends consists of."""
        if message.kind == "C":
            return ()
        edge = self._edges[message.edge]
        first = self._range(message.source_stage, message.source_micro_batch).start
        parts: list[Part] = []
        interface = self._interfaces[message.source_stage]
        place = {name: i for i, name in enumerate(interface.outputs)}
        numbers = self._gradient_numbers(message.source_stage) if message.kind == "B" else {}
        for t, tensor in enumerate(edge.tensors):
            if message.kind == "B" and not self.has_gradient(message.edge, t):
                continue
            value = place[tensor.name] if message.kind == "F" else numbers[message.edge, t]
            rows = tensor.rows_per_sample
            if rows is None:
                if message.fixed:
                    parts.append(Part(value, 0, -1, tensor_spec(tensor, 1)))
                continue
            spec = tensor_spec(tensor, message.stop - message.start)
            parts.append(Part(value, (message.start - first) * rows, spec.shape[0], spec))
        return tuple(parts)

    def _fills(self, message: Message) -> tuple[Fill, ...]:
        """What a message that this rank receives fills, in the order of :meth:`_parts`."""
        if message.kind == "C":
            return ()
        e = message.edge
        edge = self._edges[e]
        first = self._range(message.target_stage, message.target_micro_batch).start
        fills: list[Fill] = []
        for t, tensor in enumerate(edge.tensors):
            if message.kind == "B" and not self.has_gradient(e, t):
                continue
            rows = tensor.rows_per_sample
            if rows is None and not message.fixed:
                continue
            if message.kind == "F":
                slot = self._forward_slot(e, t, message.target_micro_batch)
            else:
                slot = self._gradient_slot(
                    e, t, message.target_micro_batch, message.source_micro_batch
                )
            if rows is None:
                fills.append(Fill(slot, 0, -1, self._specs[slot]))
                continue
            spec = tensor_spec(tensor, message.stop - message.start)
            whole = spec.shape[0] == self._specs[slot].shape[0]
            row = (message.start - first) * rows
            fills.append(Fill(slot, row, -1 if whole else spec.shape[0], spec))
        return tuple(fills)
