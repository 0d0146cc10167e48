"""``CostTable``: what each op of a graph takes, per kind of device and micro-batch size.

The table is filled by the analytic estimate, by the profiler, or from a published
profile; planner and simulator only read it. Times are seconds, sizes are bytes, sizes of
micro-batches are samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from graphpipe.errors import CostError

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
    """

    forward: FloatArray
    backward: FloatArray
    optimizer_seconds_per_byte: float = 0.0


@dataclass(frozen=True, eq=False)
class CostTable:
    """Costs of one graph. Row i of every array is op ``ops[i]`` = ``graph.ops[i].name``.

    Attributes:
        fingerprint: ``graph.fingerprint`` of the graph that the costs belong to.
        source: Where the numbers come from.
        ops: Op names, in the graph's order.
        micro_batches: Micro-batch sizes of the columns, ascending, samples.
        devices: Times by kind of device (the key is ``Device.kind`` of the cluster).
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
        exclusions: (op, micro-batch) pairs that cannot run, with the reason; times there are inf.
        notes: Remarks for the user, such as sizes that could not be profiled.
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

    def device_costs(self, kind: str) -> DeviceCosts:
        """Times on a kind of device.

        Raises:
            CostError: if the table has none for it.
        """
        try:
            return self.devices[kind]
        except KeyError:
            raise CostError(
                "The cost table has no times for this kind of device",
                expected=", ".join(sorted(self.devices)),
                got=repr(kind),
                fix="Estimate or profile for every kind of device in the cluster",
            ) from None

    def op_seconds(self, kind: str, micro_batch: int) -> tuple[FloatArray, FloatArray]:
        """Forward and backward seconds of every op for one micro-batch, each of shape [ops].

        Between two sizes of the table times are interpolated linearly; below the first
        size they are those of the first; above the last they grow in proportion.
        """
        costs = self.device_costs(kind)
        sizes = self.micro_batches
        if micro_batch <= sizes[0]:
            return costs.forward[:, 0], costs.backward[:, 0]
        if micro_batch >= sizes[-1]:
            factor = micro_batch / sizes[-1]
            return costs.forward[:, -1] * factor, costs.backward[:, -1] * factor
        right = int(np.searchsorted(sizes, micro_batch))
        left = right - 1
        share = (micro_batch - sizes[left]) / (sizes[right] - sizes[left])
        forward = costs.forward[:, left] * (1 - share) + costs.forward[:, right] * share
        backward = costs.backward[:, left] * (1 - share) + costs.backward[:, right] * share
        return forward, backward

    def stage_seconds(
        self, op_indices: Sequence[int], kind: str, micro_batch: int
    ) -> tuple[float, float]:
        """Forward and backward seconds of one task of a stage, with the correction."""
        forward, backward = self.op_seconds(kind, micro_batch)
        rows = np.asarray(op_indices, dtype=np.intp)
        factors = self.corrections.get(kind, (1.0, 1.0))
        return float(forward[rows].sum() * factors[0]), float(backward[rows].sum() * factors[1])

    def saved_bytes(self, op_indices: Iterable[int]) -> tuple[float, float]:
        """Bytes that a stage of these ops keeps per micro-batch in flight: fixed, per sample."""
        kept = sorted({item for op in op_indices for item in self.saved[op]})
        total = self.storages[kept].sum(axis=0) if kept else np.zeros(2)
        return float(total[0]), float(total[1])
