"""What the executor of a rank runs without looking anything up.

Everything that depends only on the plan and on the number of samples is decided here, once:
which slice of which input a task reads, which buffer a message fills, which gradients a
backward adds up. Values that wait for a task are kept in numbered *slots*:

* one for each tensor that a forward takes from another stage, filled by messages or by
  tasks of this rank, whole or slice by slice;
* one for each gradient that a backward takes, per consumer stage (tensors without a batch
  dimension: per consumer micro-batch); the backward adds them up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from graphpipe.plan.ranges import SampleRange
from graphpipe.plan.schedule import Task
from graphpipe.plan.stage import EdgeTensor


class BufferSpec(NamedTuple):
    """Shape and dtype of the tensor that a slot holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Piece(NamedTuple):
    """Part of a tensor that stays on this rank: the ``rows`` rows from ``row`` (-1: the whole
    tensor) of value number ``value`` of the task become the rows from ``slot_row`` of slot
    ``slot``; -1: they are the slot's tensor, without a copy."""

    value: int
    row: int
    rows: int
    slot: int
    slot_row: int


class Part(NamedTuple):
    """Part of a tensor in a message: value number, first row, rows; -1 rows: all of it."""

    value: int
    row: int
    rows: int
    spec: BufferSpec


class Fill(NamedTuple):
    """Part of a slot that a message fills; -1 rows: all of it."""

    slot: int
    row: int
    rows: int
    spec: BufferSpec


class InputArgument(NamedTuple):
    """A graph input: leaf number, first row, rows; -1 rows: all of it."""

    leaf: int
    row: int
    rows: int


class SlotArgument(NamedTuple):
    """A tensor of another stage; ``gradient``: whether the backward gives one back for it."""

    slot: int
    gradient: bool


class LossOutput(NamedTuple):
    """A returned value that is a loss term: which value, which term, and which value is the
    count that it is divided by (-1: none, or known before)."""

    value: int
    term: int
    divisor: int = -1


@dataclass(frozen=True, eq=False)
class ForwardTask:
    """A forward: its arguments, and what becomes of the values that it returns."""

    task: Task
    stage: int
    samples: SampleRange
    arguments: tuple[InputArgument | SlotArgument, ...]
    handed_on: tuple[tuple[int, BufferSpec], ...]
    """Values that other tasks read, with the shapes that the plan agreed on."""
    pieces: tuple[Piece, ...]
    losses: tuple[LossOutput, ...]
    results: tuple[tuple[int, int], ...]
    """(value, output number) of the values that the caller gets."""


@dataclass(frozen=True, eq=False)
class BackwardTask:
    """A backward: which gradients it takes, and where those of its inputs go."""

    task: Task
    stage: int
    samples: SampleRange
    sources: tuple[tuple[int, tuple[int, ...]], ...]
    """(value, slots): the gradient of a returned value is the sum over the slots."""
    losses: tuple[LossOutput, ...]
    arguments: tuple[int, ...]
    """Positions of the arguments that get a gradient; pieces and messages number these."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, eq=False)
class RankProgram:
    """A rank's iteration. ``actions`` pairs each action with its compiled form."""

    rank: int
    samples: SampleRange
    slots: int
    steps: tuple[tuple[str, Any], ...]
    specs: tuple[BufferSpec, ...]
    """By slot."""
    tasks: int
    last_backward: Mapping[int, int] = field(default_factory=dict)
    """By stage: position in ``steps`` of its last backward here."""


class StageInterface(NamedTuple):
    """What a stage's module takes and returns (names of ops and graph inputs)."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class GraphInterface(NamedTuple):
    """What the executor must know of the graph: leaf numbers and rows per sample of the
    inputs (None: replicated), term numbers of loss ops, by term the op of a count that only
    the forward gives, output numbers of output ops."""

    leaves: Mapping[str, tuple[int, int | None]]
    terms: Mapping[str, tuple[int, ...]]
    counts: Mapping[int, str]
    results: Mapping[str, tuple[int, ...]]


def dtype_of(name: str) -> torch.dtype:
    """The dtype with this name, such as ``float32``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def tensor_spec(tensor: EdgeTensor, samples: int) -> BufferSpec:
    """Shape and dtype of an edge's tensor for so many samples."""
    shape = tensor.shape
    if tensor.rows_per_sample is not None:
        shape = (tensor.rows_per_sample * samples, *shape[1:])
    return BufferSpec(tuple(shape), dtype_of(tensor.dtype))
