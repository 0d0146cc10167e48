"""Sizes of a graph as polynomials of the micro-batch: fixed + per sample + per sample squared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from graphpipe.cost.table import FloatArray
from graphpipe.graph.expression import Expression, evaluate
from graphpipe.graph.model_graph import ModelGraph, Op


class Size(NamedTuple):
    """``fixed + per_sample * b + square * b * b``, bytes or any other amount."""

    fixed: float = 0.0
    per_sample: float = 0.0
    square: float = 0.0

    def scaled(self, factor: float) -> Size:
        """The size times a factor."""
        return Size(self.fixed * factor, self.per_sample * factor, self.square * factor)

    def plus(self, other: Size) -> Size:
        """The sum of two sizes."""
        return Size(
            self.fixed + other.fixed, self.per_sample + other.per_sample, self.square + other.square
        )

    def at(self, batch: int) -> float:
        """The amount for a micro-batch of this many samples."""
        return self.fixed + (self.per_sample + self.square * batch) * batch


def fit(expression: Expression) -> Size:
    """The polynomial of an expression, exact for every polynomial of degree two.

    Sizes with ``//``, ``%``, ``min`` or ``max`` are matched at 16, 32 and 64 samples.
    """
    if isinstance(expression, int):
        return Size(float(expression))
    return _through(*(evaluate(expression, batch) for batch in (16, 32, 64)))


def _through(low: int, middle: int, high: int) -> Size:
    """The polynomial through the values at 16, 32 and 64 samples."""
    first, second = (middle - low) / 16, (high - middle) / 32
    square = (second - first) / 48
    per_sample = first - 48 * square
    return Size(low - 16 * per_sample - 256 * square, per_sample, square)


def output_size(op: Op) -> Size:
    """Bytes of the op's output; nothing for tuples and integers."""
    if op.output is None:
        return Size()
    return _through(*(op.output.nbytes(batch) for batch in (16, 32, 64)))


def linear_pair(size: Size, batches: Sequence[int]) -> tuple[float, float]:
    """Fixed and per-sample part; a square is replaced by the secant through the table's ends.

    Between the ends the secant lies above the square, so nothing is underestimated.
    """
    if size.square == 0.0:
        return size.fixed, size.per_sample
    low, high = batches[0], max(batches[-1], batches[0] + 1)
    slope = (size.at(high) - size.at(low)) / (high - low)
    return size.at(low) - slope * low, slope


def through(values: Mapping[int, float]) -> Size:
    """The polynomial through measured amounts by micro-batch size.

    One size: in proportion. Two: the line. More: the parabola through the smallest, the middle
    and the largest size, or the line where the square is within rounding.
    """
    sizes = sorted(values)
    if len(sizes) == 1:
        return Size(0.0, values[sizes[0]] / sizes[0])
    first, middle, last = sizes[0], sizes[len(sizes) // 2], sizes[-1]
    slope = (values[last] - values[first]) / (last - first)
    square = 0.0
    if len(sizes) > 2:
        left = (values[middle] - values[first]) / (middle - first)
        right = (values[last] - values[middle]) / (last - middle)
        square = (right - left) / (last - first)
        if abs(square) * last * last < 1e-6 * abs(values[last]):
            square = 0.0
    per_sample = slope - square * (first + last)
    return Size(values[first] - (per_sample + square * first) * first, per_sample, square)


class StorageTable(NamedTuple):
    """The storage arrays of a cost table, see :class:`~graphpipe.cost.table.CostTable`."""

    storages: FloatArray
    squares: FloatArray
    saved: tuple[tuple[int, ...], ...]


def storage_table(kept: Sequence[Mapping[str, Size]]) -> StorageTable:
    """Numbers the storages that ops keep, each id once.

    Args:
        kept: For each op, the sizes of the storages that it keeps, by id. Where two ops
            state different sizes for one id, the larger one holds.
    """
    index: dict[str, int] = {}
    sizes: list[Size] = []
    saved: list[tuple[int, ...]] = []
    for items in kept:
        rows: list[int] = []
        for key, size in items.items():
            if key not in index:
                index[key] = len(sizes)
                sizes.append(size)
            elif size.at(64) > sizes[index[key]].at(64):
                sizes[index[key]] = size
            rows.append(index[key])
        saved.append(tuple(rows))
    array = np.asarray(sizes, dtype=np.float64).reshape(-1, 3)
    squares = array[:, 2].copy()
    return StorageTable(
        array[:, :2].copy(), squares if squares.any() else np.zeros(0), tuple(saved)
    )


def values(expressions: Sequence[Expression], batches: Sequence[int]) -> FloatArray:
    """Expressions evaluated at every micro-batch size, shape [expressions, sizes]."""
    known: dict[Expression, FloatArray] = {}
    rows: list[FloatArray] = []
    for expression in expressions:
        if expression not in known:
            known[expression] = np.asarray(
                [evaluate(expression, batch) for batch in batches], dtype=np.float64
            )
        rows.append(known[expression])
    return np.asarray(rows, dtype=np.float64).reshape(len(rows), len(batches))


def message_sizes(
    graph: ModelGraph, outputs: Sequence[Size], batches: Sequence[int]
) -> tuple[FloatArray, FloatArray]:
    """``output_bytes`` and ``gradient_bytes`` of a cost table from the sizes of the outputs."""
    output = np.asarray([linear_pair(size, batches) for size in outputs], dtype=np.float64)
    needed = [op.output is not None and op.output.requires_grad for op in graph.ops]
    gradient = output * np.asarray(needed, dtype=np.float64)[:, None]
    return output, gradient


def transient_bytes(graph: ModelGraph, outputs: Sequence[Size]) -> list[Size]:
    """Gradients alive while the backward of each op runs: of its output and of its inputs."""
    index = graph.op_index
    inputs = {item.name: item.spec.requires_grad for item in graph.inputs}
    found: list[Size] = []
    for i, op in enumerate(graph.ops):
        total = Size()
        if op.requires_grad:
            total = outputs[i]
            for name in op.inputs:
                if not inputs.get(name, False) and name in index:
                    source = graph.ops[index[name]]
                    if source.output is not None and source.output.requires_grad:
                        total = total.plus(outputs[index[name]])
        found.append(total)
    return found
