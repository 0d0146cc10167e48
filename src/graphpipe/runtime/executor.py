"""Runs a rank's iteration: forwards, backwards and the messages between them.

The executor is a generator that yields where it waits (see
:mod:`graphpipe.runtime.transport`). What it does, and in which order, was decided by the
plan and compiled into a :class:`~graphpipe.runtime.rank_program.RankProgram`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from graphpipe.errors import GraphPipeError, StageFailedError
from graphpipe.graph.model_graph import LossTerm
from graphpipe.runtime.agreement import Agreement
from graphpipe.runtime.failures import PeerLostError, Watchdog
from graphpipe.runtime.losses import Weight, divisor
from graphpipe.runtime.rank_program import (
    BackwardTask,
    BufferSpec,
    ForwardTask,
    InputArgument,
    Piece,
    RankProgram,
)
from graphpipe.runtime.stage_runner import Kept, StageRunner
from graphpipe.runtime.transport import Handle, Transport, Wait


@dataclass
class TaskRecord:
    """When a task ran, in nanoseconds of the monotonic clock."""

    kind: str
    stage: int
    micro_batch: int
    start_ns: int
    end_ns: int


@dataclass
class Iteration:
    """One iteration's inputs, and what the executor leaves for its caller.

    Attributes:
        leaves: Values of the graph inputs by leaf number.
        seed: Seed of the run.
        step: Number of the optimizer step, for seeding.
        weights: By loss term (constant, per sample): a micro-batch of n samples weighs
            constant + n * per sample.
        terms: The loss terms.
        scale: Factor on all gradients (loss scaling, accumulation over mini-batches).
        training: Whether backwards follow.
        agreement: Settled before the first message or backward; None: nothing to agree on.
        after_forwards: Called after the last forward of this rank.
        after_backward: Called with a stage id after its last backward on this rank.
        losses: (weight, term, value) of every micro-batch.
        results: By output number, (first sample, samples, value) of every micro-batch.
        records: Filled if ``trace``.
    """

    leaves: Sequence[Any]
    seed: int
    step: int
    weights: list[Weight]
    terms: Sequence[LossTerm] = ()
    scale: float = 1.0
    training: bool = True
    trace: bool = False
    agreement: Agreement | None = None
    after_forwards: Callable[[], None] | None = None
    after_backward: Callable[[int], None] | None = None
    losses: list[tuple[float, int, torch.Tensor]] = field(default_factory=list)
    results: dict[int, list[tuple[int, int, torch.Tensor]]] = field(default_factory=dict)
    records: list[TaskRecord] = field(default_factory=list)


class Executor:
    """Runs one rank.

    Args:
        program: The rank's compiled iteration.
        runners: The stages of this rank by stage id.
        names: Names of all stages by id, for messages.
        transport: Where messages go.
        device: Where the rank's tensors live.
        watchdog: Told which task runs, or None.
    """

    def __init__(
        self,
        program: RankProgram,
        runners: Mapping[int, StageRunner],
        names: Sequence[str],
        transport: Transport,
        device: torch.device,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._program = program
        self._runners = runners
        self._names = names
        self._transport = transport
        self._device = device
        self._watchdog = watchdog
        self._last = {index: stage for stage, index in program.last_backward.items()}
        forwards = [index for index, (kind, _) in enumerate(program.steps) if kind == "F"]
        self._last_forward = forwards[-1] if forwards else -1
        self._credit = torch.zeros(1, dtype=torch.uint8, device=device)

    def run(self, iteration: Iteration) -> Wait:
        """Runs all tasks; returns when every message has been received and sent.

        Raises:
            StageFailedError: if a task raises; it names rank, stage, task and micro-batch.
            Refusal: if the ranks do not agree on this iteration; nothing has been sent then.
        """
        program, transport, rank = self._program, self._transport, self._program.rank
        slots: list[torch.Tensor | None] = [None] * program.slots
        kept: dict[tuple[int, int], Kept] = {}
        under_way: dict[int, list[Handle]] = {}
        values: Sequence[Any] = ()
        specs = program.specs
        agreement, last_forward = iteration.agreement, self._last_forward
        if last_forward < 0:
            if agreement is not None:
                yield from agreement.settle()
            if iteration.after_forwards is not None:
                iteration.after_forwards()
        for index, (kind, item) in enumerate(program.steps):
            if agreement is not None and (kind != "F" or index == last_forward):
                yield from agreement.settle()
                agreement = None
            if kind == "F":
                values = self._guarded(self._forward, item, slots, kept, iteration)
                if index == last_forward and iteration.after_forwards is not None:
                    iteration.after_forwards()
            elif kind == "B":
                values = self._guarded(self._backward, item, slots, kept, iteration)
                if index in self._last and iteration.after_backward is not None:
                    iteration.after_backward(self._last[index])
            elif kind == "SEND":
                number, target, parts = item
                sent: list[Handle] = []
                for value, row, rows, spec in parts:
                    tensor = values[value]
                    if tensor is None:
                        tensor = torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)
                    elif rows >= 0 and rows != tensor.shape[0]:
                        tensor = tensor.narrow(0, row, rows)
                    sent.append(transport.send(rank, target, tensor.contiguous(), number))
                if not parts:
                    sent.append(transport.send(rank, target, self._credit, number))
                under_way[number] = sent
            elif kind == "RECV":
                number, source, fills = item
                posted: list[Handle] = []
                for slot, row, rows, _ in fills:
                    buffer = slots[slot]
                    if buffer is None:
                        shape, dtype = specs[slot]
                        buffer = torch.empty(shape, dtype=dtype, device=self._device)
                        slots[slot] = buffer
                    into = buffer if rows < 0 else buffer.narrow(0, row, rows)
                    posted.append(transport.receive(source, rank, into, number))
                if not fills:
                    empty = torch.empty_like(self._credit)
                    posted.append(transport.receive(source, rank, empty, number))
                under_way[number] = posted
            else:
                for handle in under_way.pop(item):
                    while not handle.poll():
                        yield
        assert not under_way
        assert not kept

    def _guarded(
        self,
        run: Callable[..., Sequence[Any]],
        task: Any,
        slots: list[torch.Tensor | None],
        kept: dict[tuple[int, int], Kept],
        iteration: Iteration,
    ) -> Sequence[Any]:
        start = time.monotonic_ns() if iteration.trace else 0
        watchdog = self._watchdog
        if watchdog is not None:
            watchdog.begin(partial(self._where, task))
        try:
            values = run(task, slots, kept, iteration)
        except (GraphPipeError, PeerLostError):
            raise
        except Exception as error:
            raise self._failure(task, error) from error
        finally:
            if watchdog is not None:
                watchdog.end()
        if iteration.trace:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            kind, stage, number = task.task
            end = time.monotonic_ns()
            iteration.records.append(TaskRecord(kind, stage, number, start, end))
        return values

    def _forward(
        self,
        task: ForwardTask,
        slots: list[torch.Tensor | None],
        kept: dict[tuple[int, int], Kept],
        iteration: Iteration,
    ) -> Sequence[Any]:
        runner = self._runners[task.stage]
        arguments: list[Any] = []
        leaves = iteration.leaves
        training = iteration.training
        for item in task.arguments:
            if isinstance(item, InputArgument):
                value = leaves[item.leaf]
                if item.rows >= 0:
                    value = value.narrow(0, item.row, item.rows)
                arguments.append(value)
            else:
                value = slots[item.slot]
                slots[item.slot] = None
                assert value is not None
                if item.gradient and training:
                    value = value.detach().requires_grad_()
                arguments.append(value)
        size = len(task.samples)
        seed = (iteration.seed, iteration.step, task.samples.start)
        values, keep = runner.forward(size, arguments, seed, training)
        if keep is not None:
            kept[task.task[1:]] = keep
        for position, term, count in task.losses:
            if count >= 0:
                weight = iteration.terms[term].sign / divisor(
                    iteration.terms[term], float(values[count])
                )
                iteration.weights[term] = (weight, 0.0)
            constant, slope = iteration.weights[term]
            iteration.losses.append((constant + slope * size, term, values[position].detach()))
        for position, number in task.results:
            found = iteration.results.setdefault(number, [])
            found.append((task.samples.start, size, values[position].detach()))
        handed: list[Any] = [None] * len(values)
        for position, spec in task.handed_on:
            value = values[position].detach()
            if value.shape != spec.shape or value.dtype is not spec.dtype:
                raise self._mismatch(task, spec, value)
            handed[position] = value
        if task.pieces:
            self._hand_on(task.pieces, handed, slots)
        return handed

    def _backward(
        self,
        task: BackwardTask,
        slots: list[torch.Tensor | None],
        kept: dict[tuple[int, int], Kept],
        iteration: Iteration,
    ) -> Sequence[Any]:
        runner = self._runners[task.stage]
        keep = kept.pop(task.task[1:])
        size = len(task.samples)
        seed = (iteration.seed, iteration.step, task.samples.start)
        values = runner.values_for_backward(keep, size, seed)
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for position, sources in task.sources:
            total: torch.Tensor | None = None
            for slot in sources:
                part = slots[slot]
                slots[slot] = None
                if part is not None:
                    total = part if total is None else total + part
            value = values[position]
            if total is not None and value.requires_grad:
                roots.append(value)
                gradients.append(total)
        for position, term, _ in task.losses:
            value = values[position]
            if value.requires_grad:
                constant, slope = iteration.weights[term]
                weight = (constant + slope * size) * iteration.scale
                roots.append(value)
                gradients.append(torch.full_like(value, weight))
        if roots:
            torch.autograd.backward(roots, gradients)
        back = [keep.arguments[position].grad for position in task.arguments]
        if task.pieces:
            self._hand_on(task.pieces, back, slots)
        return back

    def _hand_on(
        self,
        pieces: Sequence[Piece],
        values: Sequence[Any],
        slots: list[torch.Tensor | None],
    ) -> None:
        """Gives values of a task to tasks of this rank."""
        specs = self._program.specs
        for position, row, rows, slot, slot_row in pieces:
            value = values[position]
            if value is not None and row >= 0:
                value = value.narrow(0, row, rows)
            if slot_row < 0:
                slots[slot] = value
                continue
            shape, dtype = specs[slot]
            buffer = slots[slot]
            if buffer is None:
                buffer = torch.empty(shape, dtype=dtype, device=self._device)
                slots[slot] = buffer
            part = buffer.narrow(0, slot_row, rows)
            if value is None:
                part.zero_()
            else:
                part.copy_(value)

    def _mismatch(self, task: ForwardTask, spec: BufferSpec, value: torch.Tensor) -> Exception:
        return StageFailedError(
            "A stage returned a tensor of another shape or dtype than the plan says",
            where=self._where(task),
            expected=f"{spec.dtype} {list(spec.shape)}",
            got=f"{value.dtype} {list(value.shape)}",
            fix="Capture and plan again with this model and these inputs",
        )

    def _where(self, task: Any) -> str:
        kind, stage, number = task.task
        return (
            f"rank {self._program.rank}, stage {stage} ({self._names[stage]}), "
            f"task {kind}{stage}.{number}, samples {task.samples.start} to {task.samples.stop - 1}"
        )

    def _failure(self, task: Any, error: Exception) -> StageFailedError:
        kind, _, number = task.task
        direction = "forward" if kind == "F" else "backward"
        return StageFailedError(
            f"The {direction} of micro-batch {number} failed: {type(error).__name__}: {error}",
            where=self._where(task),
        )
