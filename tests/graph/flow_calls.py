"""Calls for tests of the data-flow rules, without a graph around them."""

from __future__ import annotations

from graphpipe.graph.flow import FREE, Call, Flow, Size, Value, leaves_of


def tensor(flow: Flow, *dims: Size | int | str, dtype: str = "float32") -> Value:
    """A tensor argument; ``"b"`` is the batch, ``"2b"`` twice of it, an int a constant size."""
    return Value(flow, sizes(*dims), dtype)


def free(*dims: Size | int | str) -> Value:
    return tensor(FREE, *dims)


def sizes(*dims: Size | int | str) -> tuple[Size, ...]:
    def size(dim: Size | int | str) -> Size:
        if isinstance(dim, str):
            return int(dim[:-1] or 1), 0
        return (0, dim) if isinstance(dim, int) else dim

    return tuple(size(dim) for dim in dims)


def call(name: str, *outputs: tuple[Size, ...], **arguments: object) -> Call:
    """``name(**arguments)`` that returns tensors of these sizes."""
    return Call(name, arguments, outputs, leaves=leaves_of(arguments))
