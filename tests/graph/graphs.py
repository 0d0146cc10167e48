"""Small fx graphs built by hand, for tests of the analyses below ``capture``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpipe.graph.dataflow import DataFlow, Declared, analyse
from graphpipe.graph.fake_run import FakeRun, TensorShape, fake_run

aten = torch.ops.aten


@dataclass
class Built:
    """A graph of one op, or of what ``make`` builds, with its analysis."""

    graph: fx.Graph
    inputs: list[fx.Node]
    output: fx.Node
    flow: DataFlow
    run: FakeRun
    module: fx.GraphModule


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch.empty(tuple(shape), device="meta").stride())


def build(
    make: Callable[..., Any],
    shapes: Sequence[tuple[Any, ...]],
    dtypes: Sequence[torch.dtype] | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
    declared: Declared | None = None,
) -> Built:
    """Builds and analyses a graph.

    Args:
        make: ``make(graph, batch, *inputs)`` returns the output node; ``batch`` is the node of
            the micro-batch size; nodes of the state come last.
        shapes: Shapes of the inputs; the first dimension ``"b"`` or ``"2b"`` is the samples'.
        dtypes: Their dtypes (float32).
        state: Parameters and buffers.
        declared: Ops declared per sample.
    """
    graph = fx.Graph()
    batch = graph.placeholder("micro_batch_size")
    inputs = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    held = dict(state or {})
    nodes = [graph.create_node("get_attr", name) for name in held]
    output = make(graph, batch, *inputs, *nodes)
    kinds = list(dtypes or [torch.float32] * len(shapes))
    metas = {
        name: TensorShape(tuple(v.shape), tuple(v.stride()), v.dtype, v.requires_grad)
        for name, v in held.items()
    }
    runs = [
        fake_run(
            graph,
            n,
            metas,
            {
                node.name: TensorShape(sized(shape, n), strides(sized(shape, n)), kind)
                for node, shape, kind in zip(inputs, shapes, kinds, strict=True)
            },
            gradients=True,
            cache={},
        )
        for n in (2, 3)
    ]
    rows = {node: rows_of(shape) for node, shape in zip(inputs, shapes, strict=True)}
    flow = analyse(graph, runs[0], runs[1], rows, declared or Declared())
    graph.output(output)
    return Built(graph, inputs, output, flow, runs[0], fx.GraphModule(held, graph))


def rows_of(shape: Sequence[Any]) -> int:
    if shape and isinstance(shape[0], str):
        return int(shape[0][:-1] or 1)
    return 0


def sized(shape: Sequence[Any], n: int) -> tuple[int, ...]:
    return tuple(int(s[:-1] or 1) * n if isinstance(s, str) else s for s in shape)


def op(target: Any, *args: Any, **kwargs: Any) -> Callable[..., fx.Node]:
    """A ``make`` for one op; integers in ``args`` as they are, ``IN(i)`` for the i-th input."""

    def make(graph: fx.Graph, batch: fx.Node, *inputs: fx.Node) -> fx.Node:
        def place(value: Any) -> Any:
            if isinstance(value, IN):
                return inputs[value.index]
            if value is B:
                return batch
            if isinstance(value, (list, tuple)):
                return type(value)(place(item) for item in value)
            return value

        return graph.call_function(
            target, place(tuple(args)), {key: place(value) for key, value in kwargs.items()}
        )

    return make


@dataclass(frozen=True)
class IN:
    """The i-th input of :func:`op`."""

    index: int


B = object()
"""The micro-batch size in the arguments of :func:`op`."""
