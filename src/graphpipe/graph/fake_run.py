"""Runs a captured graph on fake tensors, for one number of samples, op by op.

Nothing is computed. The run shows the shapes and dtypes of every value, which values need a
gradient (the export itself says nowhere), which share storage, which storages the autograd
graph keeps, and what every op costs. Equal ops (the layers of a transformer) are executed
once, by :mod:`graphpipe.graph.recipe`, and looked up from then on.
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

from graphpipe.graph.opaque import OpaqueSite
from graphpipe.graph.recipe import Recipe, TensorMeta, cooked, recipe_key
from graphpipe.graph.work import NOTHING, Counts


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
        is_tuple: Whether it returns a tuple, list or dict.
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
        owners: Name of the value that brought each storage into being: of a tuple's further
            items ``op.1``, ``op.2``; of what only the op itself has seen ``op.saved0``.
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
    cache: dict[object, Recipe],
) -> FakeRun:
    """Runs ``graph`` for ``samples`` samples.

    Args:
        graph: A normalised graph.
        samples: The micro-batch size.
        state: Parameters, buffers and constants by name.
        inputs: The graph's inputs by the name of their placeholder.
        gradients: Whether autograd records (training).
        cache: What equal ops were found to do; kept between runs.
    """
    return _Run(graph, samples, state, inputs, gradients, cache).run()


class _Run:
    def __init__(
        self,
        graph: fx.Graph,
        samples: int,
        state: Mapping[str, TensorShape],
        inputs: Mapping[str, TensorShape],
        gradients: bool,
        cache: dict[object, Recipe],
    ) -> None:
        self._graph = graph
        self._result = FakeRun(samples)
        self._state = state
        self._inputs = inputs
        self._gradients = gradients
        self._cache = cache
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._storages = 0
        # Storages of parameters and buffers: they are there anyway, nothing saves them.
        self._free: set[int] = set()
        # Storages that an op in place has made need a gradient.
        self._differentiable: set[int] = set()

    def run(self) -> FakeRun:
        environment: dict[fx.Node, Any] = {}
        for node in self._graph.nodes:
            if node.op != "output":
                environment[node] = self._value(node, environment)
        for node, value in environment.items():
            # Only now: an in-place op makes earlier views of its storage need a gradient.
            observation = self._result.nodes.setdefault(node, Observation())
            if isinstance(value, TensorMeta):
                observation.values = (self._seen(value),)
            elif isinstance(value, (tuple, list, Mapping)):
                items = value.items() if isinstance(value, Mapping) else enumerate(value)
                tensors = [(i, item) for i, item in items if isinstance(item, TensorMeta)]
                observation.values = tuple(self._seen(item) for _, item in tensors)
                observation.positions = tuple(i for i, _ in tensors)
                observation.is_tuple = True
            else:
                observation.number = value
        return self._result

    def _value(self, node: fx.Node, environment: Mapping[fx.Node, Any]) -> Any:
        name = node.name
        if node.op == "placeholder":
            if name not in self._inputs:
                return self._result.samples
            return self._made(self._inputs[name], name)
        if node.op == "get_attr":
            shape = self._state.get(str(node.target))
            if shape is None:
                return node.meta["subgraph"]
            value = self._made(shape, name)
            self._free.add(value.storage)
            return value
        args: Any = fx.node.map_arg(node.args, environment.__getitem__)
        kwargs: Any = fx.node.map_arg(node.kwargs, environment.__getitem__)
        if node.op == "call_module":
            return self._opaque(node, args, kwargs)
        if node.target is operator.getitem:
            return args[0][args[1]]
        return self._operator(node, args, kwargs)

    def _made(self, shape: TensorShape, name: str) -> TensorMeta:
        extent = 1 + sum((n - 1) * step for n, step in zip(shape.shape, shape.stride, strict=True))
        nbytes = extent * shape.dtype.itemsize if 0 not in shape.shape else 0
        return TensorMeta(
            shape.shape,
            shape.stride,
            0,
            shape.dtype,
            shape.requires_grad and self._gradients,
            self._new_storage(name),
            nbytes,
        )

    def _new_storage(self, owner: str) -> int:
        self._storages += 1
        self._result.owners[self._storages] = owner
        return self._storages

    def _operator(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_meta)
        leaves = [self._current(leaf) if _is_meta(leaf) else leaf for leaf in leaves]
        given = [leaf for leaf in leaves if _is_meta(leaf)]
        if not given and not isinstance(target, torch._ops.OpOverload):
            numbers: Any = target(*args, **kwargs)
            return numbers
        key = recipe_key(target, spec, leaves, self._gradients)
        recipe = self._cache.get(key) if key is not None else None
        if recipe is None:
            recipe = cooked(target, spec, leaves, self._mode, gradients=self._gradients)
            if key is not None:
                self._cache[key] = recipe
        outputs = self._outputs(node, recipe, given)
        observation = Observation(forward=recipe.forward, backward=recipe.backward)
        observation.saves = self._saves(node, recipe, given, outputs)
        observation.mutates = frozenset(given[i].storage for i in recipe.mutates)
        # Of what is written to, only what is returned as well (not running statistics).
        changed = {output.storage for output in outputs if output.requires_grad}
        self._differentiable |= observation.mutates & changed
        self._result.nodes[node] = observation
        rest = iter(outputs)
        values = [next(rest) if kind is None else kind[0] for kind in recipe.leaves]
        return pytree.tree_unflatten(values, recipe.spec)

    def _outputs(
        self, node: fx.Node, recipe: Recipe, given: Sequence[TensorMeta]
    ) -> list[TensorMeta]:
        outputs: list[TensorMeta] = []
        fresh: dict[int, int] = {}
        for i, output in enumerate(recipe.outputs):
            if output.alias is not None:
                storage = given[output.alias].storage
            elif output.meta.storage in fresh:
                storage = fresh[output.meta.storage]
            else:
                storage = self._new_storage(f"{node.name}.{i}" if i else node.name)
                fresh[output.meta.storage] = storage
            outputs.append(output.meta.moved(storage))
        return outputs

    def _saves(
        self,
        node: fx.Node,
        recipe: Recipe,
        given: Sequence[TensorMeta],
        outputs: Sequence[TensorMeta],
    ) -> tuple[tuple[str, int], ...]:
        saves: dict[str, int] = {}
        inner = 0
        for saved in recipe.saves:
            if saved.kind == "inner":
                saves[f"{node.name}.saved{inner}"] = saved.nbytes
                inner += 1
                continue
            held = given if saved.kind == "input" else outputs
            storage = held[saved.index].storage
            if storage not in self._free:
                saves[self._result.owners[storage]] = saved.nbytes
        return tuple(saves.items())

    def _opaque(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """The outputs of an opaque module; it keeps its inputs and outputs for a backward."""
        site: OpaqueSite = node.meta["opaque"]
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=_is_meta)
        given = [self._current(leaf) for leaf in leaves if _is_meta(leaf)]
        names = set(node.meta["parameters"])
        held = [shape for name, shape in self._state.items() if name in names]
        needs = self._gradients and (
            any(shape.requires_grad for shape in held) or any(item.requires_grad for item in given)
        )
        outputs = []
        for i, (dims, dtype) in enumerate(site.outputs):
            shape = tuple(factor * self._result.samples + constant for factor, constant in dims)
            floating = dtype.is_floating_point or dtype.is_complex
            stride = tuple(torch.empty(shape, device="meta").stride())
            made = self._made(
                TensorShape(shape, stride, dtype, needs and floating),
                f"{node.name}.{i}" if i else node.name,
            )
            outputs.append(made)
        # The inside is unknown: the estimate takes every parameter for the weight of a linear.
        rows = max((item.rows for item in given), default=1)
        weights = sum(_numel(shape) for shape in held)
        moved = sum(item.nbytes for item in (*given, *outputs))
        forward = Counts(2 * weights * rows, moved + 4 * weights, 1)
        observation = Observation(forward=forward)
        if needs:
            kept = {item.storage: item.nbytes for item in (*given, *outputs)}
            observation.saves = tuple(
                (self._result.owners[storage], nbytes)
                for storage, nbytes in kept.items()
                if storage not in self._free
            )
            observation.backward = Counts(2 * forward.flops, 2 * forward.bytes, 2)
        self._result.nodes[node] = observation
        return pytree.tree_unflatten(outputs, site.output_spec)

    def _current(self, value: TensorMeta) -> TensorMeta:
        """The value as it is now, after the in-place ops so far."""
        return value.grown() if self._needs_gradient(value) else value

    def _needs_gradient(self, value: TensorMeta) -> bool:
        floating = value.dtype.is_floating_point or value.dtype.is_complex
        return value.requires_grad or (floating and value.storage in self._differentiable)

    def _seen(self, value: TensorMeta) -> Seen:
        return Seen(
            value.shape,
            str(value.dtype).removeprefix("torch."),
            self._needs_gradient(value),
            value.storage,
        )


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, TensorMeta)


def _numel(shape: TensorShape) -> int:
    count = 1
    for size in shape.shape:
        count *= size
    return count
