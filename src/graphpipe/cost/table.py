"""``CostTable``: what each op of a graph takes, per kind of device and micro-batch size.

The table is filled by the analytic estimate, by the profiler, or from a published
profile; planner and simulator only read it. Times are seconds, sizes are bytes, sizes of
micro-batches are samples.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from graphpipe.errors import CostError

if TYPE_CHECKING:
    from graphpipe.graph.model_graph import ModelGraph

FloatArray = npt.NDArray[np.float64]
Source = Literal["analytic", "profiled", "published"]


@dataclass(frozen=True)
class ParameterMemory:
    """Bytes that a device holds for each byte of a parameter in the model.

    Attributes:
        weight: The weights themselves, plus a low-precision working copy if there is one.
        gradient: Gradients of trainable parameters.
        optimizer: Optimizer state of trainable parameters.

    ``for_optimizer("adamw", "fp32")`` is (1, 1, 2): two moments as large as the weight.
    """

    weight: float = 1.0
    gradient: float = 1.0
    optimizer: float = 2.0

    @classmethod
    def for_optimizer(cls, optimizer: str, precision: str = "fp32") -> ParameterMemory:
        """The factors of a named optimizer: ``sgd``, ``sgd-momentum``, ``adam``, ``adamw``.

        Precision ``fp32``; ``bf16-mixed`` or ``fp16-mixed`` (fp32 weights, gradients and
        state under autocast); ``bf16`` (all in bf16: the factors are relative to the
        parameter's own bytes).

        Raises:
            CostError: for an unknown name.
        """
        states = {"sgd": 0.0, "sgd-momentum": 1.0, "adagrad": 1.0, "adam": 2.0, "adamw": 2.0}
        if optimizer not in states:
            raise CostError(
                "Unknown optimizer",
                expected=", ".join(sorted(states)),
                got=repr(optimizer),
                fix="Give ParameterMemory(weight, gradient, optimizer) yourself",
            )
        if precision not in ("fp32", "bf16", "bf16-mixed", "fp16-mixed"):
            raise CostError(
                "Unknown precision",
                expected="fp32, bf16, bf16-mixed or fp16-mixed",
                got=repr(precision),
            )
        return cls(1.0, 1.0, states[optimizer])


@dataclass(frozen=True, eq=False)
class DeviceCosts:
    """Times on one kind of device.

    Attributes:
        forward: Seconds, shape [ops, micro-batch sizes].
        backward: Seconds, same shape; 0 for an op without a backward.
        optimizer_seconds_per_byte: Optimizer step, per byte of trainable parameters.
        optimizer_seconds_per_tensor: The same, per trainable parameter: what its kernels take
            however small it is. Measured costs have one addition into ``.grad`` taken off both:
            ``backward`` has one for every micro-batch, and the first of an iteration needs none.
    """

    forward: FloatArray
    backward: FloatArray
    optimizer_seconds_per_byte: float = 0.0
    optimizer_seconds_per_tensor: float = 0.0

    def optimizer_seconds(self, nbytes: float, tensors: float) -> float:
        """Seconds of the optimizer step of parameters of so many bytes, in so many tensors."""
        return (
            self.optimizer_seconds_per_byte * nbytes + self.optimizer_seconds_per_tensor * tensors
        )


class Exclusion(NamedTuple):
    """A micro-batch size at which an op cannot run.

    Attributes:
        op: Name of the op.
        micro_batch: Samples.
        reason: Why, such as ``out of memory``.
    """

    op: str
    micro_batch: int
    reason: str


@dataclass(frozen=True, eq=False)
class CostTable:
    """Costs of one graph. Row i of every array is op ``ops[i]`` = ``graph.ops[i].name``.

    Attributes:
        fingerprint: ``graph.fingerprint`` of the graph that the costs belong to.
        source: Where the numbers come from.
        ops: Op names, in the graph's order.
        micro_batches: Micro-batch sizes of the columns, ascending, samples.
        devices: Times by kind of device (the key is ``Device.kind`` of the cluster). The times
            of a published table hold for every kind.
        output_bytes: [ops, 2]: bytes of the op's output, fixed and per sample.
        gradient_bytes: [ops, 2]: bytes of the gradient message for that output; 0 where the
            output needs no gradient.
        storages: [storages, 2]: bytes kept from forward to backward, fixed and per sample.
        saved: For each op the indices into ``storages`` that it keeps. A stage keeps each
            storage once.
        workspace_bytes: [ops, 2]: transient peak while the op runs.
        parameter_memory: Factors for weights, gradients and optimizer state.
        corrections: Measured factors (forward, backward) by kind of device that turn a sum
            of op times into the time of a stage; 1.0 where nothing was measured.
        exclusions: Sizes at which an op cannot run; its time there is inf.
        storage_squares: [storages]: bytes per sample squared, on top of ``storages``, for what
            grows with b * b (the similarity matrix of a contrastive loss); empty if none does.
        spreads: Relative spread of the repeats behind each measured time, by kind of device:
            (forward, backward), each [ops, micro-batch sizes]; empty unless profiled.
        hosts: By kind of device, the hardware that was measured; empty unless profiled.
        torch_version: Version of torch that was measured; empty unless profiled.
        notes: Remarks for the user, such as sizes that could not be profiled.
        optimizer: Name of the optimizer whose step and memory are meant; empty if unknown.
        precision: Precision that the times are meant for; empty if unknown.

    Raises:
        CostError: if shapes disagree, a number is negative or not finite (other than the
            inf of an exclusion), or sizes do not ascend.
    """

    fingerprint: str
    source: Source
    ops: tuple[str, ...]
    micro_batches: tuple[int, ...]
    devices: Mapping[str, DeviceCosts]
    output_bytes: FloatArray
    gradient_bytes: FloatArray
    storages: FloatArray
    saved: tuple[tuple[int, ...], ...]
    workspace_bytes: FloatArray
    parameter_memory: ParameterMemory = field(default_factory=ParameterMemory)
    corrections: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    storage_squares: FloatArray = field(default_factory=lambda: np.zeros(0))
    spreads: Mapping[str, tuple[FloatArray, FloatArray]] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)
    torch_version: str = ""
    optimizer: str = ""
    precision: str = ""

    def __post_init__(self) -> None:
        check_table(self)

    def check(self, graph: ModelGraph) -> None:
        """Refuses a stale table: call this wherever a graph and a table meet.

        A measured table is also refused if torch has another version than the one that was
        measured, as far as the graph knows it.

        Raises:
            CostError: if the table was not made for exactly this graph.
        """
        fix = "Estimate or profile again for this graph"
        if self.fingerprint != graph.fingerprint:
            names = tuple(op.name for op in graph.ops)
            detail = "the same ops, but other shapes, parameters or mode"
            if names != self.ops:
                first = next(
                    (a or b for a, b in zip_longest(names, self.ops) if a != b), "their number"
                )
                detail = f"other ops, the first of them {first!r}"
            raise CostError(
                f"These costs belong to another graph ({detail})",
                where=f"graph '{graph.name}'",
                expected=f"fingerprint {graph.fingerprint}",
                got=self.fingerprint,
                fix=fix,
            )
        both = self.torch_version and graph.torch_version
        if both and self.torch_version != graph.torch_version:
            raise CostError(
                "These costs were measured with another version of torch",
                where=f"graph '{graph.name}'",
                expected=graph.torch_version,
                got=self.torch_version,
                fix=fix,
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the table as JSON (kind ``graphpipe-costs``)."""
        from graphpipe.cost.table_file import CostTableFile

        CostTableFile.of(self).save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a table written by :meth:`save`. Call :meth:`check` with the graph next.

        Raises:
            FileFormatError: naming the field that is malformed.
        """
        from graphpipe.cost.table_file import CostTableFile

        return CostTableFile.load(path).table(cls, where=str(path))

    def device_costs(self, kind: str) -> DeviceCosts:
        """Times on a kind of device.

        Raises:
            CostError: if the table has none for it.
        """
        if self.source == "published" and len(self.devices) == 1:
            return next(iter(self.devices.values()))
        try:
            return self.devices[kind]
        except KeyError:
            raise CostError(
                "The cost table has no times for this kind of device",
                expected=", ".join(sorted(self.devices)),
                got=repr(kind),
                fix="Estimate or profile for every kind of device in the cluster",
            ) from None

    @cached_property
    def _excluded_rows(self) -> dict[int, list[int]]:
        """Rows that cannot run, by micro-batch size."""
        row = {name: i for i, name in enumerate(self.ops)}
        rows: dict[int, list[int]] = {}
        for op, micro_batch, _ in self.exclusions:
            rows.setdefault(micro_batch, []).append(row[op])
        return rows

    def op_seconds(self, kind: str, micro_batch: int) -> tuple[FloatArray, FloatArray]:
        """Forward and backward seconds of every op for one micro-batch, each of shape [ops].

        Between two sizes of the table times are interpolated linearly; below the first
        size they are those of the first; above the last they grow in proportion. Where an
        op cannot run, its time is inf.
        """
        costs = self.device_costs(kind)
        forward = _at_size(costs.forward, self.micro_batches, micro_batch)
        backward = _at_size(costs.backward, self.micro_batches, micro_batch)
        rows = self._excluded_rows.get(micro_batch)
        if rows:
            forward, backward = forward.copy(), backward.copy()
            forward[rows] = np.inf
            backward[rows] = np.inf
        return forward, backward

    def stage_seconds(
        self, op_indices: Sequence[int], kind: str, micro_batch: int
    ) -> tuple[float, float]:
        """Forward and backward seconds of one task of a stage, with the correction."""
        forward, backward = self.op_seconds(kind, micro_batch)
        rows = np.asarray(op_indices, dtype=np.intp)
        factors = self.corrections.get(kind, (1.0, 1.0))
        return float(forward[rows].sum() * factors[0]), float(backward[rows].sum() * factors[1])

    def saved_bytes(
        self, op_indices: Iterable[int], micro_batch: int | None = None
    ) -> tuple[float, float]:
        """Bytes that a stage of these ops keeps per micro-batch in flight: fixed, per sample.

        With ``micro_batch`` (samples) given, the bytes per sample are those at that size,
        including what grows with its square; without it that part is left out.
        """
        kept = sorted({item for op in op_indices for item in self.saved[op]})
        total = self.storages[kept].sum(axis=0) if kept else np.zeros(2)
        square = 0.0
        if micro_batch is not None and self.storage_squares.size and kept:
            square = float(self.storage_squares[kept].sum()) * micro_batch
        return float(total[0]), float(total[1]) + square


def _at_size(times: FloatArray, sizes: tuple[int, ...], micro_batch: int) -> FloatArray:
    """The column of ``times`` for a size, see :meth:`CostTable.op_seconds`."""
    column: FloatArray
    if micro_batch <= sizes[0]:
        column = times[:, 0]
    elif micro_batch >= sizes[-1]:
        column = times[:, -1] * (micro_batch / sizes[-1])
    else:
        right = int(np.searchsorted(sizes, micro_batch))
        if sizes[right] == micro_batch:
            column = times[:, right]
        else:
            left = right - 1
            share = (micro_batch - sizes[left]) / (sizes[right] - sizes[left])
            column = times[:, left] * (1 - share) + times[:, right] * share
    return column


def check_table(table: CostTable) -> None:
    """The shapes and values of a table hold together.

    Raises:
        CostError: naming the field.
    """
    ops, sizes = len(table.ops), table.micro_batches
    if not table.ops or len(set(table.ops)) != ops:
        raise CostError("A cost table needs ops with distinct names", where="field 'ops'")
    if not sizes or sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes)):
        raise CostError(
            "Micro-batch sizes must be positive and ascend",
            where="field 'micro_batches'",
            got=sizes,
        )
    if not table.devices:
        raise CostError("A cost table needs a kind of device", where="field 'devices'")
    if len(table.saved) != ops:
        raise CostError("A list of storages per op", where="field 'saved'", expected=ops)
    storages = len(table.storages)
    if any(not 0 <= item < storages for items in table.saved for item in items):
        raise CostError("An op saves an unknown storage", where="field 'saved'")
    if unknown := sorted({item.op for item in table.exclusions} - set(table.ops)):
        raise CostError("An unknown op is excluded", where="field 'exclusions'", got=unknown[0])
    named: dict[str, tuple[FloatArray, tuple[int, ...]]] = {
        "output_bytes": (table.output_bytes, (ops, 2)),
        "gradient_bytes": (table.gradient_bytes, (ops, 2)),
        "workspace_bytes": (table.workspace_bytes, (ops, 2)),
        "storages": (table.storages, (storages, 2)),
    }
    if table.storage_squares.size:
        named["storage_squares"] = (table.storage_squares, (storages,))
    for name, (array, shape) in named.items():
        _check_array(array, shape, name, finite=True, signed=True)
    excluded = {item.op for item in table.exclusions}
    for kind, costs in table.devices.items():
        shape = (ops, len(sizes))
        _check_array(costs.forward, shape, f"devices.{kind}.forward", finite=False)
        _check_array(costs.backward, shape, f"devices.{kind}.backward", finite=False)
        endless = np.isinf(costs.forward).any(axis=-1) | np.isinf(costs.backward).any(axis=-1)
        for row in np.flatnonzero(endless):
            if table.ops[row] not in excluded:
                raise CostError(
                    "A time is infinite, and no exclusion says why",
                    where=f"field 'devices.{kind}', op '{table.ops[row]}'",
                )
        for field_name in ("optimizer_seconds_per_byte", "optimizer_seconds_per_tensor"):
            if not 0 <= getattr(costs, field_name) < np.inf:
                raise CostError("Not a time", where=f"field 'devices.{kind}.{field_name}'")


def _check_array(
    array: FloatArray, shape: tuple[int, ...], name: str, *, finite: bool, signed: bool = False
) -> None:
    """``signed``: a fixed part may be negative (of 3 * b - 2), times and the like may not."""
    if array.shape != shape:
        raise CostError(
            "An array of the cost table has the wrong shape",
            where=f"field '{name}'",
            expected=shape,
            got=array.shape,
        )
    wrong = np.isnan(array) if not finite else ~np.isfinite(array)
    if not signed:
        wrong |= array < 0
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise CostError(
            "A number of the cost table is negative or not finite",
            where=f"field '{name}', position {place}",
            got=float(array[place]),
        )
