"""``profile``: the costs of a captured graph, measured on a device of this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from graphpipe.cost.hardware import hardware
from graphpipe.cost.profiler.evict import Evictor
from graphpipe.cost.profiler.facts import OpFacts, facts_at, program_of
from graphpipe.cost.profiler.heap import kept_heap
from graphpipe.cost.profiler.measure import (
    TOGETHER_BYTES,
    Budget,
    Meter,
    OpMeasurement,
    extrapolated,
)
from graphpipe.cost.profiler.neighbours import busy_neighbours
from graphpipe.cost.profiler.optimizer import OptimizerCosts, optimizer_costs
from graphpipe.cost.profiler.slices import (
    Correction,
    SliceMeasurement,
    SliceRunner,
    fit_correction,
    slices_of,
)
from graphpipe.cost.profiler.timing import Timing, is_out_of_memory
from graphpipe.cost.sizes import (
    Size,
    linear_pair,
    message_sizes,
    storage_table,
    through,
    transient_bytes,
)
from graphpipe.cost.table import CostTable, DeviceCosts, Exclusion, FloatArray, ParameterMemory
from graphpipe.errors import CostError
from graphpipe.graph.model_graph import ModelGraph

DEFAULT_MICRO_BATCHES = (1, 2, 4, 8)
Progress = Callable[[int, int, str], None]
"""Called with (done, total, what is measured next)."""

_FREE = ("<built-in function getitem>",)


@dataclass
class _Column:
    """Everything measured at one micro-batch size."""

    micro_batch: int
    facts: dict[str, OpFacts]
    measured: dict[str, OpMeasurement | None] = field(default_factory=dict)


def profile(
    graph: ModelGraph,
    device: torch.device | str = "cpu",
    *,
    kind: str | None = None,
    micro_batches: Sequence[int] | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    parameter_memory: ParameterMemory | None = None,
    budget: Budget | None = None,
    correction_seconds: float = 2.0,
    progress: Progress | None = None,
    neighbours: int = 0,
) -> CostTable:
    """Measures every distinct op of a captured graph, forward and backward apart.

    Distinct means: operator, shapes, strides, dtypes and other arguments. Equal ops are
    measured once per micro-batch size, with fresh made-up arguments in every repeat; the
    smallest time counts and the spread is kept. Gradients are also added up where a value
    has several readers, and into ``.grad`` of parameters. A few slices of the model are
    then measured whole; see :mod:`graphpipe.cost.profiler.slices`.

    Args:
        graph: A graph captured in this process.
        device: ``cpu`` or a CUDA device.
        kind: Name of this kind of device in the table and in clusters; by default the name
            in the device catalogue (``cpu-core``, ``h100-sxm``, ...).
        micro_batches: Sizes to measure at, samples; by default 1, 2, 4 and 8.
        optimizer: For the memory of its state and the time of its step, which is measured.
        precision: ``fp32``: as captured; ``bf16-mixed`` or ``fp16-mixed``: under autocast.
        parameter_memory: Factors of your own, where the optimizer is another one.
        budget: How often each op is repeated.
        correction_seconds: About how long to measure slices; 0: not at all.
        progress: Called before each measurement.
        neighbours: Other workers that will compute on this host at the same time. So many
            processes measure the same model on other cores meanwhile, without end, since cores
            share caches and memory bandwidth. CPU only.

    Returns:
        Times in seconds, sizes in bytes; sizes at which an op ran out of memory are inf, with
        an exclusion and a note.

    Raises:
        CostError: for a graph without program, or sizes that do not ascend; if an op fails for
            another reason than memory, naming it.
    """
    place = torch.device(device)
    sizes = tuple(micro_batches) if micro_batches is not None else DEFAULT_MICRO_BATCHES
    if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
        raise CostError("Micro-batch sizes must be positive and ascend", got=sizes)
    program_of(graph)

    def measured(progress: Progress | None) -> CostTable:
        return _Profiler(
            graph, place, sizes, precision, budget or Budget(), correction_seconds, progress
        ).run(kind, optimizer, parameter_memory)

    if not neighbours or place.type != "cpu":
        return measured(progress)
    with busy_neighbours(neighbours, lambda: measured(None)):
        return measured(progress)


class _Profiler:
    def __init__(
        self,
        graph: ModelGraph,
        device: torch.device,
        sizes: tuple[int, ...],
        precision: str,
        budget: Budget,
        correction_seconds: float,
        progress: Progress | None,
    ) -> None:
        self._graph = graph
        self._device = device
        self._sizes = sizes
        self._precision = precision
        self._autocast = _autocast(precision, device)
        self._evictor = Evictor(graph, device)
        self._meter = Meter(device, self._evictor, budget)
        self._correction_seconds = correction_seconds
        self._progress = progress
        self._known: dict[tuple[object, ...], OpMeasurement | None] = {}
        self._sums: dict[tuple[object, ...], Timing] = {}
        self._failed: set[str] = set()
        self._notes: list[str] = []
        self._exclusions: list[Exclusion] = []

    def run(
        self, kind: str | None, optimizer: str, parameter_memory: ParameterMemory | None
    ) -> CostTable:
        memory = parameter_memory or ParameterMemory.for_optimizer(optimizer, self._precision)
        found = hardware(self._device)
        name = kind or found.kind
        with self._autocast(), kept_heap(self._device) as heap:
            self._meter.heap = heap
            columns = [_Column(size, facts_at(self._graph, size)) for size in self._sizes]
            self._measure(columns)
            forward, backward = self._times(columns)
            slices = self._measure_slices(columns, forward[0], backward[0])
            step = self._optimizer(optimizer)
        forward_fix, backward_fix = self._corrections(slices)
        has_backward = backward[0][:, :1] > 0
        seconds = DeviceCosts(
            forward[0] + forward_fix.overhead * self._counts(columns),
            np.where(has_backward, backward[0] + backward_fix.overhead, 0.0),
            step.per_byte,
            step.per_tensor,
        )
        return self._table(
            columns,
            name,
            seconds,
            (forward[1], backward[1]),
            {name: (forward_fix.factor, backward_fix.factor)},
            memory,
            found.description,
            optimizer,
        )

    def _measure(self, columns: Sequence[_Column]) -> None:
        """Every distinct op at every size, the smallest size first."""
        jobs: list[tuple[_Column, OpFacts]] = []
        seen: set[tuple[object, ...]] = set()
        for column in columns:
            for facts in column.facts.values():
                if not _is_free(facts) and facts.signature not in seen:
                    seen.add(facts.signature)
                    jobs.append((column, facts))
        longer, budget, total = 0, self._meter.budget, 2 * len(jobs)
        for done, (column, facts) in enumerate(jobs):
            self._tell(done, total, f"{facts.op.target} at {column.micro_batch}")
            known = self._before(columns, column, facts)
            state = sum(item.nbytes for item in facts.tensors if item.state)
            grown = extrapolated(column.micro_batch, known, budget, state)
            if grown is not None:
                longer += 1
            self._known[facts.signature] = grown or self._one(facts, column.micro_batch)
        for done, (column, facts) in enumerate(jobs, len(jobs)):
            self._tell(done, total, f"{facts.op.target} at {column.micro_batch} again")
            self._again(facts)
        if longer:
            self._notes.append(
                f"{longer} measurements of long ops are extrapolated from smaller sizes, where "
                "their time per sample was constant"
            )
        self._tell(total, total, "whole slices")
        for column in columns:
            for name, facts in column.facts.items():
                if not _is_free(facts):
                    column.measured[name] = self._known[facts.signature]
                    if column.measured[name] is None:
                        self._exclusions.append(
                            Exclusion(name, column.micro_batch, "out of memory")
                        )

    def _tell(self, done: int, total: int, what: str) -> None:
        if self._progress is not None:
            self._progress(done, total, what)

    def _again(self, facts: OpFacts) -> None:
        """The second round of an op that is not too long for it."""
        before = self._known[facts.signature]
        if before is None or facts.nbytes > TOGETHER_BYTES // 4:
            return
        if before.forward.seconds + before.backward.seconds > self._meter.budget.again:
            return
        try:
            self._known[facts.signature] = self._meter.again(facts, before)
        except Exception as error:
            if not is_out_of_memory(error):
                raise

    def _before(
        self, columns: Sequence[_Column], column: _Column, facts: OpFacts
    ) -> list[tuple[int, OpMeasurement]]:
        """Measurements of the same op at smaller sizes."""
        found: list[tuple[int, OpMeasurement]] = []
        for other in columns:
            if other.micro_batch >= column.micro_batch:
                break
            measured = self._known.get(other.facts[facts.op.name].signature)
            if measured is not None:
                found.append((other.micro_batch, measured))
        return found

    def _one(self, facts: OpFacts, micro_batch: int) -> OpMeasurement | None:
        """The measurement; None where it does not fit into memory, now or at a smaller size."""
        kind = f"{facts.op.target} of {facts.op.module or 'the model'}"
        if kind in self._failed:
            return None
        try:
            return self._meter.measure(facts)
        except Exception as error:
            if not is_out_of_memory(error):
                raise CostError(
                    f"An op cannot be run on made-up inputs ({type(error).__name__}: {error})",
                    where=f"op '{facts.op.name}' ({facts.op.target}) of '{facts.op.module}'"
                    + (f", {facts.op.source}" if facts.op.source else ""),
                    fix="Mark its module as opaque, or estimate the costs instead",
                ) from error
            self._failed.add(kind)
            self._notes.append(
                f"{kind} runs out of memory at {micro_batch} samples; "
                f"this size and larger ones are left out"
            )
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            return None

    def _times(
        self, columns: Sequence[_Column]
    ) -> tuple[tuple[FloatArray, FloatArray], tuple[FloatArray, FloatArray]]:
        """((forward, spread), (backward, spread)), each [ops, sizes], gradient sums included."""
        shape = (len(self._graph.ops), len(columns))
        forward, backward = np.zeros(shape), np.zeros(shape)
        forward_spread, backward_spread = np.zeros(shape), np.zeros(shape)
        for j, column in enumerate(columns):
            for i, op in enumerate(self._graph.ops):
                if op.name not in column.measured:
                    continue
                measured = column.measured[op.name]
                if measured is None:
                    forward[i, j] = backward[i, j] = np.inf
                    continue
                forward[i, j] = measured.forward.seconds
                forward_spread[i, j] = measured.forward.spread
                if op.requires_grad:
                    backward[i, j] = measured.backward.seconds
                    backward[i, j] += self._gradient_sums(column.facts[op.name])
                    backward_spread[i, j] = measured.backward.spread
        return (forward, forward_spread), (backward, backward_spread)

    def _gradient_sums(self, facts: OpFacts) -> float:
        """Adding the gradients of all readers of its value, and those of its parameters."""
        total = 0.0
        position = self._graph.op_index[facts.op.name]
        readers = sum(self._graph.ops[i].requires_grad for i in self._graph.successors[position])
        if readers > 1 and len(facts.outputs) == 1 and facts.outputs[0].requires_grad:
            fact = facts.outputs[0]
            key = ("add", fact.shape, fact.dtype)
            if key not in self._sums:
                self._sums[key] = self._meter.add(fact.shape, fact.dtype)
            total += (readers - 1) * self._sums[key].seconds
        for fact in facts.tensors:
            if fact.state and fact.requires_grad:
                key = ("accumulate", fact.shape, fact.dtype)
                if key not in self._sums:
                    self._sums[key] = self._meter.accumulate(fact.shape, fact.dtype)
                total += self._sums[key].seconds
        return total

    def _optimizer(self, name: str) -> OptimizerCosts:
        """The optimizer step, less the additions into ``.grad`` that the first micro-batch of
        an iteration does not make."""
        step = optimizer_costs(name, self._graph, self._device, self._meter.clock, self._evictor)
        additions = [
            (item.nbytes, self._sums[key].seconds)
            for item in self._graph.parameters
            if (key := ("accumulate", item.shape, getattr(torch, item.dtype))) in self._sums
        ]
        return step.without_first(additions, self._meter.accumulate((1,), torch.float32).seconds)

    def _counts(self, columns: Sequence[_Column]) -> FloatArray:
        """1 for each op that is called, [ops, 1]; prep ops and items of tuples are not."""
        measured = columns[0].measured
        return np.asarray(
            [[1.0 if op.name in measured and not op.prep else 0.0] for op in self._graph.ops]
        )

    def _measure_slices(
        self, columns: Sequence[_Column], forward: FloatArray, backward: FloatArray
    ) -> list[SliceMeasurement]:
        """Slices whole, small ones first, until the time for it is used up."""
        index = self._graph.op_index
        jobs: list[tuple[float, int, int]] = []
        parts = slices_of(self._graph) if self._correction_seconds > 0 else []
        for number, part in enumerate(parts):
            rows = [index[name] for name in part.ops]
            for j in range(len(columns)):
                total = float(forward[rows, j].sum() + backward[rows, j].sum())
                if np.isfinite(total):
                    jobs.append((total, number, j))
        left = self._correction_seconds
        found: list[SliceMeasurement] = []
        for total, number, j in sorted(jobs):
            repeats = max(2, min(25, int(0.1 / max(total, 1e-9))))
            if total * (repeats + 1) > left:
                break
            part, column = parts[number], columns[j]
            rows = [index[name] for name in part.ops]
            try:
                runner = SliceRunner(
                    self._graph, part, column.facts, column.micro_batch, self._device, self._evictor
                )
                times = runner.run(repeats)
            except Exception as error:
                self._notes.append(f"a slice could not be measured whole: {error}")
                continue
            left -= total * (repeats + 1) + 0.02 * repeats
            found.append(
                SliceMeasurement(
                    part,
                    column.micro_batch,
                    *times,
                    float(forward[rows, j].sum()),
                    float(backward[rows, j].sum()),
                    sum(name in column.measured for name in part.ops),
                    int((backward[rows, j] > 0).sum()),
                )
            )
        return found

    def _corrections(self, slices: Sequence[SliceMeasurement]) -> tuple[Correction, Correction]:
        forward = fit_correction(
            np.asarray([item.forward.seconds for item in slices]),
            np.asarray([item.forward_sum for item in slices]),
            np.asarray([float(item.forward_ops) for item in slices]),
        )
        backward = fit_correction(
            np.asarray([item.backward.seconds for item in slices]),
            np.asarray([item.backward_sum for item in slices]),
            np.asarray([float(item.backward_ops) for item in slices]),
        )
        if slices:
            self._notes.append(
                f"corrected by {len(slices)} measurements of slices: forward x "
                f"{forward.factor:.3f} + {forward.overhead * forward.factor * 1e6:.1f} us an op, "
                f"backward x {backward.factor:.3f} + "
                f"{backward.overhead * backward.factor * 1e6:.1f} us an op"
            )
        return forward, backward

    def _table(
        self,
        columns: Sequence[_Column],
        name: str,
        seconds: DeviceCosts,
        spreads: tuple[FloatArray, FloatArray],
        corrections: dict[str, tuple[float, float]],
        memory: ParameterMemory,
        host: str,
        optimizer: str,
    ) -> CostTable:
        outputs = [
            through({c.micro_batch: _output_bytes(c.facts[op.name]) for c in columns})
            for op in self._graph.ops
        ]
        output, gradient = message_sizes(self._graph, outputs, self._sizes)
        kept = storage_table([self._saved(op.name, columns) for op in self._graph.ops])
        return CostTable(
            fingerprint=self._graph.fingerprint,
            source="profiled",
            ops=tuple(op.name for op in self._graph.ops),
            micro_batches=self._sizes,
            devices={name: seconds},
            output_bytes=output,
            gradient_bytes=gradient,
            storages=kept.storages,
            saved=kept.saved,
            workspace_bytes=self._workspace(columns, outputs),
            parameter_memory=memory,
            corrections=corrections,
            notes=tuple(self._notes),
            exclusions=tuple(self._exclusions),
            storage_squares=kept.squares,
            spreads={name: spreads},
            hosts={name: host},
            torch_version=torch.__version__,
            optimizer=optimizer,
            precision=self._precision,
        )

    def _saved(self, name: str, columns: Sequence[_Column]) -> dict[str, Size]:
        if not self._graph.op_by_name[name].requires_grad:
            return {}
        seen: dict[str, dict[int, int]] = {}
        for column in columns:
            measured = column.measured.get(name)
            facts = column.facts[name]
            for item in measured.saved if measured is not None else ():
                if item.kind == "internal":
                    key, nbytes = f"{name}.saved{item.index}", item.nbytes
                else:
                    facts_of = facts.tensors if item.kind == "input" else facts.outputs
                    fact = facts_of[item.index]
                    key, nbytes = fact.root, fact.root_bytes
                seen.setdefault(key, {})[column.micro_batch] = nbytes
        return {key: through(values) for key, values in seen.items()}

    def _workspace(self, columns: Sequence[_Column], outputs: Sequence[Size]) -> FloatArray:
        """The measured peak on a GPU; elsewhere the gradients alive in the op's backward."""
        rows: list[tuple[float, float]] = []
        guessed = transient_bytes(self._graph, outputs)
        for i, op in enumerate(self._graph.ops):
            found = {
                column.micro_batch: measured.workspace
                for column in columns
                if (measured := column.measured.get(op.name)) is not None
                and measured.workspace >= 0
            }
            size = through(found) if found else guessed[i]
            rows.append(linear_pair(size, self._sizes))
        return np.asarray(rows, dtype=np.float64)


def _autocast(precision: str, device: torch.device) -> Callable[[], Any]:
    low = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(precision)
    if low is None:
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, dtype=low, cache_enabled=False)


def _is_free(facts: OpFacts) -> bool:
    """Taking an item of a tuple."""
    return str(facts.node.target) in _FREE


def _output_bytes(facts: OpFacts) -> int:
    """Bytes of a single tensor; nothing for a tuple, whose parts are ops of their own."""
    return facts.outputs[0].nbytes if facts.op.output is not None and facts.outputs else 0
