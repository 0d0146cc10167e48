"""The analytic estimate: costs for a device that is not at hand.

An op of ``k`` kernels with ``F`` FLOPs and ``M`` bytes of memory traffic takes

    max(F / (rate share) + k ramp,  M / (bandwidth share) + k ramp) + k launch

seconds, with the device's peak rate for the op's dtype (see
:mod:`graphpipe.cost.catalogue`): the roofline model (Williams, Waterman, Patterson, 2009)
with a saturating efficiency. FLOPs, bytes and kernels come from the capture, as functions
of the micro-batch. Weights are read again for every micro-batch and small kernels do not
fill a device, so a sample is dearer in a small micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from graphpipe.cost.catalogue import DeviceSpec, device
from graphpipe.cost.cluster import Cluster
from graphpipe.cost.precision import OpPrecision, run_in
from graphpipe.cost.sizes import linear_pair, message_sizes, storage_table, transient_bytes, values
from graphpipe.cost.table import CostTable, DeviceCosts, FloatArray, ParameterMemory
from graphpipe.errors import CostError
from graphpipe.graph.model_graph import ModelGraph

DEFAULT_MICRO_BATCHES = tuple(2**i for i in range(17))
"""1, 2, 4, ... 65,536 samples."""

OPTIMIZER_PASSES = {"sgd": 3.0, "sgd-momentum": 8.0, "adagrad": 14.0, "adam": 20.0, "adamw": 20.0}
"""Times that a step reads or writes memory as large as the parameters.

Counted from the sequence of multi-tensor kernels of ``torch.optim`` with its default
``foreach`` implementation (AdamW: decay 2, lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2,
addcdiv 4). ``fused=True`` needs about a third.
"""
OPTIMIZER_KERNELS = {"sgd": 1, "sgd-momentum": 3, "adagrad": 4, "adam": 8, "adamw": 8}
"""Kernels of the same sequences."""

Devices = str | DeviceSpec | Cluster | Iterable[str | DeviceSpec]


def estimate(
    graph: ModelGraph,
    devices: Devices,
    *,
    micro_batches: Sequence[int] | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    parameter_memory: ParameterMemory | None = None,
) -> CostTable:
    """Estimates the costs of every op on one or several kinds of device.

    Args:
        graph: A captured graph, or one read from its file.
        devices: A device of the catalogue (or its name), several of them, or a cluster, whose
            kinds of device are then looked up in the catalogue.
        micro_batches: Micro-batch sizes of the columns, samples; powers of two up to 65,536 by
            default.
        optimizer: ``sgd``, ``sgd-momentum``, ``adagrad``, ``adam`` or ``adamw``: for the
            memory of its state and the time of its step.
        precision: One of :data:`graphpipe.cost.precision.PRECISIONS`.
        parameter_memory: Factors of your own, where the optimizer is another one.

    Returns:
        Times in seconds, sizes in bytes.

    Raises:
        CostError: for an unknown optimizer or precision, or sizes that do not ascend.
        ClusterError: for a device that the catalogue does not know.
    """
    specs = _specs(devices)
    sizes = tuple(micro_batches) if micro_batches is not None else DEFAULT_MICRO_BATCHES
    if not sizes or any(size < 1 for size in sizes):
        raise CostError("Micro-batch sizes must be positive", got=sizes)
    memory = parameter_memory or ParameterMemory.for_optimizer(
        optimizer, "fp32" if precision == "tf32" else precision
    )
    runs = run_in(graph, precision)
    kept = storage_table(
        [item.saves if op.requires_grad else {} for op, item in zip(graph.ops, runs, strict=True)]
    )
    outputs = [item.output for item in runs]
    output, gradient = message_sizes(graph, outputs, sizes)
    workspace = [linear_pair(size, sizes) for size in transient_bytes(graph, outputs)]
    work = _Work(graph, runs, sizes)
    return CostTable(
        fingerprint=graph.fingerprint,
        source="analytic",
        ops=tuple(op.name for op in graph.ops),
        micro_batches=sizes,
        devices={
            spec.name: DeviceCosts(*work.seconds(spec), *_optimizer_seconds(spec, optimizer))
            for spec in specs
        },
        output_bytes=output,
        gradient_bytes=gradient,
        storages=kept.storages,
        saved=kept.saved,
        workspace_bytes=np.asarray(workspace, dtype=np.float64),
        parameter_memory=memory,
        storage_squares=kept.squares,
        optimizer=optimizer,
        precision=precision,
    )


def _optimizer_seconds(spec: DeviceSpec, optimizer: str) -> tuple[float, float]:
    """Seconds of an optimizer step per byte of parameters, and per parameter."""
    passes = OPTIMIZER_PASSES.get(optimizer, OPTIMIZER_PASSES["adamw"])
    kernels = OPTIMIZER_KERNELS.get(optimizer, OPTIMIZER_KERNELS["adamw"])
    per_byte = passes / (spec.bandwidth * spec.efficiency.memory)
    return per_byte, kernels * spec.launch_seconds / spec.multi_tensor


def _specs(devices: Devices) -> list[DeviceSpec]:
    if isinstance(devices, Cluster):
        return [device(kind) for kind in devices.kinds]
    items = [devices] if isinstance(devices, str | DeviceSpec) else list(devices)
    specs = [device(item) if isinstance(item, str) else item for item in items]
    names = [spec.name for spec in specs]
    if not specs or len(set(names)) != len(names):
        raise CostError("Give at least one device, and each kind once", got=names)
    return specs


class _Work:
    """FLOPs, bytes and kernels of every op, arrays of shape [ops, micro-batch sizes]."""

    def __init__(
        self, graph: ModelGraph, runs: Sequence[OpPrecision], sizes: Sequence[int]
    ) -> None:
        scale = np.asarray([[item.scale] for item in runs])
        batches = np.asarray(sizes, dtype=np.float64)
        fixed, per_sample, square = np.asarray([item.cast_bytes for item in runs]).T[:, :, None]
        self.cast_bytes: FloatArray = fixed + (per_sample + square * batches) * batches
        self.cast_kernels = np.asarray([[item.cast_kernels] for item in runs])
        self.rates = [item.rate for item in runs]
        self.trained = np.asarray([[op.requires_grad] for op in graph.ops], dtype=np.float64)
        forward, backward = [op.forward for op in graph.ops], [op.backward for op in graph.ops]
        self.forward = (
            values([work.flops for work in forward], sizes),
            values([work.bytes for work in forward], sizes) * scale,
            np.asarray([[work.kernels] for work in forward]),
        )
        self.backward = (
            values([work.flops for work in backward], sizes),
            values([work.bytes for work in backward], sizes) * scale,
            np.asarray([[work.kernels] for work in backward]),
        )

    def seconds(self, spec: DeviceSpec) -> tuple[FloatArray, FloatArray]:
        """Forward and backward seconds on a device."""
        rates = np.asarray([[spec.rate(dtype)] for dtype in self.rates])
        # A cast forward is undone, for the gradients, by a cast of the same size backward.
        casts = _roofline(spec, rates, 0.0 * self.cast_bytes, self.cast_bytes, self.cast_kernels)
        forward = _roofline(spec, rates, *self.forward) + casts
        backward = _roofline(spec, rates, *self.backward) + casts
        return forward, backward * self.trained


def _roofline(
    spec: DeviceSpec,
    rates: FloatArray,
    flops: FloatArray,
    nbytes: FloatArray,
    kernels: npt.NDArray[np.int64],
) -> FloatArray:
    """``DeviceSpec.kernel_seconds`` for arrays."""
    share = spec.efficiency
    compute = flops / (rates * share.compute) + kernels * share.compute_ramp
    memory = nbytes / (spec.bandwidth * share.memory) + kernels * share.memory_ramp
    work = np.maximum(np.where(flops > 0, compute, 0.0), np.where(nbytes > 0, memory, 0.0))
    return np.where(kernels > 0, work + kernels * spec.launch_seconds, 0.0)
