"""Runs a captured graph on fake tensors, for one number of samples, op by op.

Nothing is computed, yet autograd runs as it will: the run shows the shapes and dtypes of
every value, which values need a gradient (the export itself says nowhere), which share
storage, which storages the autograd graph keeps, and what every op costs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from graphpipe.graph.autocast import operator_of
from graphpipe.graph.opaque import OpaqueSite
from graphpipe.graph.work import NOTHING, Counter, Counts, backward_counts


@dataclass(frozen=True)
class Seen:
    """One tensor value.

    Attributes:
        shape: Its shape for this number of samples.
        dtype: Without ``torch.``.
        requires_grad: Whether a gradient flows back into it (at the end of the run, so that
            later mutations count).
        storage: Number of its storage, the same for all views of it.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    storage: int


@dataclass
class Observation:
    """What the run shows of one node.

    Attributes:
        values: Its tensor outputs: one for a tensor, several for a tuple, none for a number.
        positions: Place of each in the tuple; empty for a tensor or a number.
        number: The value of a node that is a number.
        saves: Storages that the autograd graph keeps: (owner's name, bytes).
        mutates: Storages that it wrote to.
        forward: Work of the forward.
        backward: Work of the backward.
    """

    values: tuple[Seen, ...] = ()
    positions: tuple[object, ...] = ()
    is_tuple: bool = False
    number: object = None
    saves: tuple[tuple[str, int], ...] = ()
    mutates: frozenset[int] = frozenset()
    forward: Counts = NOTHING
    backward: Counts = NOTHING


@dataclass(frozen=True)
class TensorShape:
    """A parameter, buffer, constant or input for a fake run."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False


@dataclass
class FakeRun:
    """The observations of one run.

    Attributes:
        samples: The number of samples.
        nodes: By node.
        owners: Name of the value that brought each storage into being; storages inside of an
            op have the op's name and a number.
    """

    samples: int
    nodes: dict[fx.Node, Observation] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)


def fake_run(
    graph: fx.Graph,
    samples: int,
    state: Mapping[str, TensorShape],
    inputs: Mapping[str, TensorShape],
    *,
    gradients: bool,
    work: bool = True,
    cache: dict[object, Counts] | None = None,
) -> FakeRun:
    """Runs ``graph`` for ``samples`` samples.

    Args:
        graph: A normalised graph; nodes after an output node are not run.
        samples: The micro-batch size.
        state: Parameters, buffers and constants by name.
        inputs: The graph's inputs by the name of their placeholder.
        gradients: Whether autograd records (training).
        work: Whether the work of every op is counted.
        cache: Backward work by op and shapes, kept between the runs for one size.
    """
    return _Run(graph, samples, state, inputs, gradients, work, cache).run()


class _Run:
    def __init__(
        self,
        graph: fx.Graph,
        samples: int,
        state: Mapping[str, TensorShape],
        inputs: Mapping[str, TensorShape],
        gradients: bool,
        work: bool,
        cache: dict[object, Counts] | None,
    ) -> None:
        self._graph = graph
        self._result = FakeRun(samples)
        self._state = state
        self._inputs = inputs
        self._gradients = gradients
        self._work = work
        self._cache = {} if cache is None else cache
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Keeping every storage alive keeps its address its own.
        self._alive: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}
        self._free: set[int] = set()

    def run(self) -> FakeRun:
        environment: dict[fx.Node, Any] = {}
        with self._mode, torch.set_grad_enabled(self._gradients):
            for node in self._graph.nodes:
                if node.op == "output":
                    continue
                environment[node] = self._value(node, environment)
        for node, value in environment.items():
            # Only now: an in-place op makes earlier views of its storage need a gradient.
            observation = self._result.nodes.setdefault(node, Observation())
            if isinstance(value, torch.Tensor):
                observation.values = (self._seen(value),)
            elif isinstance(value, (tuple, list, Mapping)):
                items = value.items() if isinstance(value, Mapping) else enumerate(value)
                tensors = [(i, item) for i, item in items if isinstance(item, torch.Tensor)]
                observation.values = tuple(self._seen(item) for _, item in tensors)
                observation.positions = tuple(i for i, _ in tensors)
                observation.is_tuple = True
            else:
                observation.number = value
        return self._result

    def _value(self, node: fx.Node, environment: Mapping[fx.Node, Any]) -> Any:
        name = node.name
        match node.op:
            case "placeholder":
                if name not in self._inputs:
                    return self._result.samples
                return self._own(self._make(self._inputs[name]), name)
            case "get_attr":
                shape = self._state.get(str(node.target))
                if shape is None:
                    return node.meta["subgraph"]
                value = self._own(self._make(shape), name)
                self._free.add(self._storage(value))
                return value
        args: Any = fx.node.map_arg(node.args, environment.__getitem__)
        kwargs: Any = fx.node.map_arg(node.kwargs, environment.__getitem__)
        if node.op == "call_module":
            return self._opaque(node, args, kwargs)
        if node.target is operator.getitem:
            return args[0][args[1]]
        return self._operator(node, args, kwargs)

    def _make(self, shape: TensorShape) -> torch.Tensor:
        value = torch.empty_strided(shape.shape, shape.stride, dtype=shape.dtype, device="cpu")
        return value.requires_grad_(shape.requires_grad and self._gradients)

    def _operator(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        tensors = [leaf for leaf in _leaves(args, kwargs) if isinstance(leaf, torch.Tensor)]
        if not tensors and not isinstance(target, torch._ops.OpOverload):
            numbers: Any = target(*args, **kwargs)
            return numbers
        kept: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        counter = Counter()
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, _same)
        if self._work:
            with hooks, counter:
                value = target(*args, **kwargs)
        else:
            with hooks:
                value = target(*args, **kwargs)
        outputs = [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]
        for i, output in enumerate(outputs):
            self._own(output, node.name if i == 0 else f"{node.name}.{i}")
        observation = Observation(forward=counter.counts)
        observation.saves = self._saved(node, kept)
        observation.mutates = self._mutated(node, args, kwargs)
        if self._work and any(output.requires_grad for output in outputs):
            observation.backward = backward_counts(target, args, kwargs, self._cache)
        self._result.nodes[node] = observation
        return value

    def _opaque(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """The outputs of an opaque module; it keeps its inputs and outputs for a backward."""
        site: OpaqueSite = node.meta["opaque"]
        tensors = [leaf for leaf in _leaves(args, kwargs) if isinstance(leaf, torch.Tensor)]
        parameters = [
            shape
            for name, shape in self._state.items()
            if name in node.meta["parameters"] and shape.requires_grad
        ]
        grad = self._gradients and (
            bool(parameters) or any(tensor.requires_grad for tensor in tensors)
        )
        outputs = []
        for dims, dtype in site.outputs:
            shape = [factor * self._result.samples + constant for factor, constant in dims]
            needs = grad and (dtype.is_floating_point or dtype.is_complex)
            outputs.append(
                self._own(torch.empty(shape, dtype=dtype, requires_grad=needs), node.name)
            )
        moved = sum(tensor.nbytes for tensor in (*tensors, *outputs))
        rows = max(
            (tensor.numel() // tensor.shape[-1] for tensor in tensors if tensor.dim()), default=1
        )
        weights = sum(
            _numel(shape) for n, shape in self._state.items() if n in node.meta["parameters"]
        )
        # The inside is unknown: the estimate takes every parameter for the weight of a linear.
        forward = Counts(2 * weights * rows, moved + 4 * weights, 1)
        observation = Observation(forward=forward)
        if grad:
            observation.saves = self._saved(node, [*tensors, *outputs])
            observation.backward = Counts(2 * forward.flops, 2 * forward.bytes, 2)
        self._result.nodes[node] = observation
        return pytree.tree_unflatten(outputs, site.output_spec)

    def _saved(self, node: fx.Node, kept: Sequence[torch.Tensor]) -> tuple[tuple[str, int], ...]:
        saves: dict[str, int] = {}
        for tensor in kept:
            storage = self._storage(tensor)
            if storage in self._free:
                continue
            owner = self._result.owners.get(storage)
            if owner is None:
                owner = f"{node.name}.saved{len(saves)}"
                self._result.owners[storage] = owner
            saves[owner] = tensor.untyped_storage().nbytes()
        return tuple(saves.items())

    def _mutated(self, node: fx.Node, args: Any, kwargs: Any) -> frozenset[int]:
        target, _, _ = operator_of(node)
        schema = getattr(target, "_schema", None)
        if schema is None:
            return frozenset()
        skip = len(args) - len(operator_of(node)[1])
        written = list(zip(schema.arguments, args[skip:], strict=False))
        written += [(argument, kwargs.get(argument.name)) for argument in schema.arguments]
        found = set()
        statistics = _running_statistics(target, args[skip:])
        for argument, value in written:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes or argument.name in statistics:
                for leaf in _leaves(value):
                    if isinstance(leaf, torch.Tensor):
                        found.add(self._storage(leaf))
        return frozenset(found)

    def _own(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        self._result.owners.setdefault(self._storage(tensor), name)
        return tensor

    def _storage(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._alive.append(storage)
        return self._numbers[key]

    def _seen(self, tensor: torch.Tensor) -> Seen:
        return Seen(
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tensor.requires_grad,
            self._storage(tensor),
        )


_STATISTICS = ("running_mean", "running_var")


def _running_statistics(target: Any, args: Sequence[Any]) -> tuple[str, ...]:
    """Running statistics that a normalisation updates although its schema does not say so."""
    name = getattr(target, "_opname", "")
    if name in ("batch_norm", "native_batch_norm", "cudnn_batch_norm", "instance_norm"):
        training = args[5] if len(args) > 5 else False
        return _STATISTICS if training else ()
    return ()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _leaves(*trees: Any) -> list[Any]:
    return pytree.tree_leaves(trees)


def _numel(shape: TensorShape) -> int:
    count = 1
    for size in shape.shape:
        count *= size
    return count
