"""Runs of consecutive ops, measured as a stage would run them.

The sum of single ops is not the time of a stage: calling one op after another costs
something, caches are colder than in a loop over one op, some work overlaps. A few slices
of the model are measured whole; against the sum of their ops they give a factor and an
overhead per op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import lsq_linear
from torch import fx, nn

from graphpipe.cost.profiler.evict import Evictor
from graphpipe.cost.profiler.facts import OpFacts, TensorFact, program_of
from graphpipe.cost.profiler.inputs import index_limits, opaque_copy, tensor_of
from graphpipe.cost.profiler.timing import Clock, Timing
from graphpipe.cost.table import FloatArray
from graphpipe.graph.cut import StageCut, stage_cut
from graphpipe.graph.devices import place_node_on
from graphpipe.graph.model_graph import BATCH_SIZE_INPUT, ModelGraph, Op
from graphpipe.graph.program import Program

LEAST_OPS, MOST_OPS = 8, 60

PULL = 0.05
"""Weight of "the factor is one" against one slice."""
LEAST_FACTOR, MOST_FACTOR = 0.5, 2.0
MOST_OVERHEAD = 50e-6
"""Seconds an op; what lies outside of these bounds is a disturbance, not a property."""


class Slice(NamedTuple):
    """Ops next to one another in the graph's order, atomic groups whole."""

    ops: tuple[str, ...]


class SliceMeasurement(NamedTuple):
    """A slice at one micro-batch size: measured, and the sum of its ops, seconds."""

    slice: Slice
    micro_batch: int
    forward: Timing
    backward: Timing
    forward_sum: float
    backward_sum: float
    forward_ops: int
    backward_ops: int


class Correction(NamedTuple):
    """What turns a sum of op times into the time of a stage.

    ``factor * (sum + overhead * ops)``; ``overhead`` in seconds, already divided by the factor.
    """

    factor: float = 1.0
    overhead: float = 0.0


def slices_of(graph: ModelGraph, most: int = 4) -> list[Slice]:
    """Slices that differ from one another, spread over the graph.

    Args:
        graph: The graph.
        most: At most so many.
    """
    ops = [op for op in graph.ops if not op.prep]
    parts = max(1, min(2 * most + 1, len(ops) // LEAST_OPS))
    length = min(MOST_OPS, max(LEAST_OPS, len(ops) // parts))
    cuts = _legal_cuts(ops)
    found: list[Slice] = []
    start = 0
    while start < len(ops) and len(found) < 4 * most:
        stop = next((cut for cut in cuts if cut >= start + length), len(ops))
        if stop - start >= LEAST_OPS and stop - start <= 2 * MOST_OPS:
            found.append(Slice(tuple(op.name for op in ops[start:stop])))
        start = stop
    return found[:: max(1, -(-len(found) // most))]


def _legal_cuts(ops: Sequence[Op]) -> list[int]:
    """Positions between two ops where no atomic group and no uncrossable value is cut."""
    place = {op.name: i for i, op in enumerate(ops)}
    last_of_group: dict[int, int] = {}
    reach = list(range(len(ops)))
    for i, op in enumerate(ops):
        if op.group is not None:
            last_of_group[op.group] = i
    for i, op in enumerate(ops):
        if op.group is not None:
            reach[i] = last_of_group[op.group]
        for source in op.inputs:
            j = place.get(source)
            if j is not None and (ops[j].output is None or not ops[j].crossable):
                reach[j] = max(reach[j], i)
    cuts: list[int] = []
    furthest = -1
    for i in range(len(ops)):
        furthest = max(furthest, reach[i])
        if furthest <= i:
            cuts.append(i + 1)
    return cuts


class SliceRunner:
    """A slice as a module with made-up inputs, on one device.

    Args:
        graph: The graph.
        part: The slice.
        facts: Facts of all ops at the micro-batch size.
        micro_batch: Samples.
        device: Where.
        evictor: Makes caches as cold as the rest of the model would.
    """

    def __init__(
        self,
        graph: ModelGraph,
        part: Slice,
        facts: Mapping[str, OpFacts],
        micro_batch: int,
        device: torch.device,
        evictor: Evictor,
    ) -> None:
        self._clock = Clock(device)
        self._evictor = evictor
        self._batch = micro_batch
        self._cut = stage_cut(graph, part.ops)
        self._given = _given_facts(self._cut, facts)
        limits: dict[str, int] = {}
        for name in (*self._cut.prep, *self._cut.ops):
            limits.update(index_limits(facts[name]))
        self._limits = limits
        self._device = device
        program = program_of(graph)
        self.state = {
            path: _value(program.state[path], graph, path, device)
            for path in _state_paths(program, self._cut)
        }
        """Made-up parameters, buffers and constants by name; gradients add up in them."""
        for tensor in self.state.values():
            if tensor.requires_grad:
                tensor.grad = torch.zeros_like(tensor)
        given = (*self._given, *self.state)
        self._module = _module(graph, self._cut, given, facts, device)

    def run(self, repeats: int) -> tuple[Timing, Timing]:
        """Forward and backward of the slice, after a warm-up that does not count."""
        forward: list[float] = []
        backward: list[float] = []
        for _ in range(repeats + 1):
            given = [self._argument(name, fact) for name, fact in self._given.items()]
            arguments = [*given, *self.state.values()]
            self._evictor.evict()
            # The ops before the slice have just made what it reads.
            self._evictor.touch(given)
            seconds, outputs = self._clock.time(
                lambda a=arguments: self._module.forward(self._batch, *a)  # type: ignore[misc]
            )
            forward.append(seconds)
            roots = [item for item in outputs if item.requires_grad]
            if roots:
                gradients = [torch.ones_like(item) for item in roots]
                seconds, _ = self._clock.time(
                    lambda r=roots, g=gradients: torch.autograd.backward(r, g)  # type: ignore[misc]
                )
                backward.append(seconds)
        return Timing.of(forward[1:]), Timing.of(backward[1:])

    def _argument(self, name: str, fact: TensorFact) -> torch.Tensor:
        tensor = tensor_of(fact, self._device, self._limits.get(name))
        return tensor.requires_grad_(fact.requires_grad)


def _given_facts(cut: StageCut, facts: Mapping[str, OpFacts]) -> dict[str, TensorFact]:
    """Facts of the values that the slice is given: graph inputs and other ops' values."""
    wanted = {*cut.inputs, *cut.reads}
    found: dict[str, TensorFact] = {}
    for name in (*cut.prep, *cut.ops):
        for fact in facts[name].tensors:
            if fact.name in wanted:
                found.setdefault(fact.name, fact)
    return found


def _state_paths(program: Program, cut: StageCut) -> list[str]:
    """Names of the parameters, buffers and constants that the slice reads."""
    members = {*cut.ops, *cut.prep}
    found: dict[str, None] = {}
    for node in program.module.graph.nodes:
        if node.name in members:
            for source in node.all_input_nodes:
                if source.op == "get_attr" and str(source.target) in program.state:
                    found[str(source.target)] = None
    return list(found)


def _module(
    graph: ModelGraph,
    cut: StageCut,
    given: Sequence[str],
    facts: Mapping[str, OpFacts],
    device: torch.device,
) -> fx.GraphModule:
    """``forward(micro_batch_size, *given)``; parameters are arguments, as in a stage."""
    program = program_of(graph)
    new = fx.Graph()
    copies: dict[str, fx.Node] = {BATCH_SIZE_INPUT: new.placeholder(BATCH_SIZE_INPUT)}
    arguments = {name: new.placeholder(f"given_{i}") for i, name in enumerate(given)}
    root: dict[str, nn.Module] = {}
    members = {*cut.ops, *cut.prep}

    def copied(node: fx.Node) -> fx.Node:
        if node.name in copies:
            return copies[node.name]
        key = str(node.target) if node.op == "get_attr" else node.name
        if key in arguments:
            copies[node.name] = arguments[key]
            return arguments[key]
        for source in node.all_input_nodes:
            copied(source)
        if node.op in ("get_attr", "call_module"):
            path = str(node.target)
            root.setdefault(path, opaque_copy(program.module.get_submodule(path), device))
        made = new.node_copy(node, lambda source: copies[source.name])
        place_node_on(made, device)
        copies[node.name] = made
        return made

    for node in program.module.graph.nodes:
        if node.name in members:
            copied(node)
    outputs = [
        copies[name]
        for name in dict.fromkeys((*cut.writes, *cut.sinks))
        if facts[name].outputs and graph.op_by_name[name].output is not None
    ]
    new.output(tuple(outputs))
    return fx.GraphModule(root, new, class_name="Slice")


def _value(
    tensor: torch.Tensor, graph: ModelGraph, path: str, device: torch.device
) -> torch.Tensor:
    """A made-up parameter or buffer; the user's own are never touched."""
    value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if value.dtype.is_floating_point:
        value.fill_(1.0 / max(value.shape) if value.dim() > 1 else 1.0)
    else:
        value.zero_()
    known = graph.parameter_by_name.get(path)
    trained = known is not None and known.trainable and not known.is_buffer
    return value.requires_grad_(trained and value.dtype.is_floating_point)


def fit_correction(measured: FloatArray, sums: FloatArray, ops: FloatArray) -> Correction:
    """Factor and overhead from slices: least squares of the relative errors.

    Both are at least zero, and the factor is drawn towards one, so that slices too alike to
    tell factor and overhead apart do not give an extreme pair.

    Args:
        measured: Seconds of the slices, shape [slices].
        sums: Sums of their ops' seconds.
        ops: Numbers of their ops.
    """
    usable = (measured > 0) & (sums > 0)
    if not usable.any():
        return Correction()
    y, x, n = measured[usable], sums[usable], ops[usable]
    pull = np.sqrt(PULL * len(y))
    rows = np.stack([np.append(x / y, pull), np.append(n / y, 0.0)], axis=1)
    # In units of the largest overhead, so that both unknowns are of a size.
    rows[:, 1] *= MOST_OVERHEAD
    bounds = ((LEAST_FACTOR, 0.0), (MOST_FACTOR, 1.0))
    solved = lsq_linear(rows, np.append(np.ones(len(y)), pull), bounds=bounds)
    factor, overhead = (float(value) for value in solved.x)
    return Correction(factor, overhead * MOST_OVERHEAD / factor)
