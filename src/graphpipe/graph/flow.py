"""Where the samples are in a value: the vocabulary of the data-flow analysis.

Every value of a captured graph is one of

=========  ====================================================================
``FREE``   it does not depend on the samples (parameters, constants, masks)
``ROWS``   the samples lie along one dimension and each row depends on its own
           sample alone
``PLACES`` like an ``arange`` over the batch: the row's place in the micro-batch
``SUM``    no batch dimension, a sum over the samples (with ``power`` -1: a mean)
``MIXED``  anything else: it depends on which samples are together
=========  ====================================================================

A dimension that holds the samples has the size ``outer * b * inner`` and its index runs over
(outer, sample, inner); ``outer == 1`` means sample-major. ``power`` says that the value is
b**power times something that does not depend on b.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from torch.utils import _pytree as pytree


class Kind(Enum):
    """See the module's docstring."""

    FREE = "free"
    ROWS = "rows"
    PLACES = "places"
    SUM = "sum"
    MIXED = "mixed"


@dataclass(frozen=True)
class Flow:
    """Where the samples are in a value; ``step`` is the stride of the numbers of PLACES."""

    kind: Kind
    dim: int = 0
    outer: int = 1
    inner: int = 1
    power: int = 0
    step: int = 1

    @property
    def batched(self) -> bool:
        """Whether there is a dimension that holds the samples."""
        return self.kind in (Kind.ROWS, Kind.PLACES)

    @property
    def layout(self) -> tuple[int, int]:
        return (self.outer, self.inner)

    def at(self, dim: int) -> Flow:
        """The same with the samples in dimension ``dim``."""
        return replace(self, dim=dim)


FREE = Flow(Kind.FREE)
MIXED = Flow(Kind.MIXED)


def rows(dim: int, outer: int = 1, inner: int = 1, power: int = 0) -> Flow:
    """Samples along ``dim``."""
    return Flow(Kind.ROWS, dim, outer, inner, power)


def total(power: int = 0) -> Flow:
    """A sum over the samples; with power -1 a mean."""
    return Flow(Kind.SUM, power=power)


Size = tuple[int, int] | None
"""(factor, constant) of a size ``factor * b + constant``; None where it is no such thing."""


@dataclass(frozen=True)
class Value:
    """A tensor argument: its flow, its dimensions, its dtype."""

    flow: Flow
    dims: tuple[Size, ...]
    dtype: str = "float32"

    @property
    def ndim(self) -> int:
        return len(self.dims)


@dataclass(frozen=True)
class Number:
    """A number that depends on the batch: its size, None where it is not linear in it."""

    size: Size


@dataclass(frozen=True)
class Call:
    """One application of an op, its arguments by the names of the op's schema.

    Attributes:
        name: Name of the op without overload, such as ``softmax``.
        arguments: Argument by name; tensors are :class:`Value`, numbers that depend on the
            batch :class:`Number`, anything else is itself.
        outputs: Dimensions of each tensor that it returns.
        tags: Names of torch's tags for it.
    """

    name: str
    arguments: dict[str, Any]
    outputs: tuple[tuple[Size, ...], ...]
    tags: frozenset[str] = frozenset()
    leaves: tuple[Any, ...] = field(default=())

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        value = self.arguments.get(name)
        return default if value is None else value

    def values(self) -> Iterator[Value]:
        """All tensor arguments, also those in lists."""
        return (leaf for leaf in self.leaves if isinstance(leaf, Value))

    def numbers(self) -> Iterator[Number]:
        return (leaf for leaf in self.leaves if isinstance(leaf, Number))

    @property
    def first(self) -> Value:
        """The first tensor argument."""
        return next(self.values())

    @property
    def ndim(self) -> int:
        """Dimensions of the (first) output."""
        return len(self.outputs[0])

    def dims_of(self, name: str, ndim: int) -> list[int]:
        """A dimension argument as a list of non-negative numbers; all of them if absent."""
        given = self.arguments.get(name)
        if given is None:
            return list(range(ndim))
        if isinstance(given, int):
            given = [given]
        listed = list(given) or list(range(ndim))
        return [int(d) % ndim if ndim else 0 for d in listed]


@dataclass(frozen=True)
class Result:
    """The flows of an op's outputs, and whether it mixes samples."""

    flows: tuple[Flow, ...]
    coupled: bool = False


def same(flow: Flow, call: Call, *, coupled: bool = False) -> Result:
    """The same flow for all outputs."""
    return Result((flow,) * max(1, len(call.outputs)), coupled)


def mixed(call: Call) -> Result:
    """The op mixes the samples and so does all that it returns."""
    return same(MIXED, call, coupled=True)


def depends(size: Size) -> bool:
    """Whether a size depends on the batch."""
    return size is None or size[0] != 0


def leaves_of(arguments: Any) -> tuple[Any, ...]:
    return tuple(pytree.tree_leaves(arguments, is_leaf=lambda x: isinstance(x, (Value, Number))))


def product(sizes: Sequence[Size]) -> int | None:
    """The product of sizes that do not depend on the batch; None if one does."""
    result = 1
    for size in sizes:
        if size is None or size[0]:
            return None
        result *= size[1]
    return result
