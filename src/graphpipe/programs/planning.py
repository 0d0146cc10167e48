"""From what a user names to a plan: capture, costs, cluster, search."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import nn

from graphpipe.cost.analytic import estimate
from graphpipe.cost.boxes import named_cluster
from graphpipe.cost.cluster import Cluster
from graphpipe.cost.published.build import GraphFile
from graphpipe.cost.published.load import load_graph_file
from graphpipe.cost.table import CostTable
from graphpipe.errors import ClusterError, InputError
from graphpipe.graph.capture import CoupledBatchWarning, capture
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.zoo.job import Job
from graphpipe.zoo.load import load_job

GIB = 2**30
MOST_PER_NODE = 8
"""Devices of a node where the user does not say: what boxes of today hold."""


@dataclass(frozen=True)
class Hardware:
    """How a user names the devices.

    Attributes:
        cluster: A cluster's short name or file, instead of device, devices and per_node.
        device: Kind of device.
        devices: Number of devices in all.
        per_node: Devices of a node.
        memory_gib: GiB that a plan may use of each device, instead of all that it has.
    """

    cluster: str | None = None
    device: str | None = None
    devices: int | None = None
    per_node: int | None = None
    memory_gib: float | None = None

    @property
    def memory_bytes(self) -> int | None:
        """Bytes that a plan may use of each device; None: all."""
        return None if self.memory_gib is None else round(self.memory_gib * GIB)

    def build(self) -> Cluster:
        """The cluster.

        Raises:
            ClusterError: If the options contradict one another or do not say enough.
        """
        memory = self.memory_bytes
        if self.cluster is not None:
            if any(x is not None for x in (self.device, self.devices, self.per_node)):
                raise ClusterError(
                    "A cluster and options for its devices were both given",
                    got=f"--cluster {self.cluster} with --device, --devices or --per-node",
                    fix="Leave one of them out",
                )
            found = named_cluster(self.cluster)
            if memory is None:
                return found
            devices = tuple(
                item.model_copy(update={"memory_bytes": memory}) for item in found.devices
            )
            return Cluster(**{**dict(found), "devices": devices})
        if self.device is None or self.devices is None:
            raise ClusterError(
                "The devices to plan for are not named",
                fix="Give --device and --devices, such as --device a100-80gb --devices 8, "
                "or a cluster, such as --cluster 4xdgx-a100 or --cluster cluster.toml",
            )
        per_node = self.per_node or min(self.devices, MOST_PER_NODE)
        if self.devices % per_node:
            raise ClusterError(
                "The devices do not fill whole nodes",
                expected=f"a multiple of {per_node} devices",
                got=self.devices,
                fix="Give --per-node, or describe unequal nodes in a cluster file",
            )
        return Cluster.uniform(
            self.device,
            nodes=self.devices // per_node,
            per_node=per_node,
            memory_bytes=memory,
        )


@dataclass(frozen=True)
class Problem:
    """What a planner is given."""

    graph: ModelGraph
    costs: CostTable
    cluster: Cluster
    batch_size: int


def capture_job(job: Job, model: nn.Module | None = None) -> ModelGraph:
    """The graph of a job's model and loss.

    Args:
        job: The job.
        model: Its model, built; by default it is built on the meta device if the job allows.
    """
    source = job if model is not None else job.on_meta()
    module = model if model is not None else source.build_model()
    with warnings.catch_warnings():
        # Whether samples are mixed within a micro-batch is the plan's choice: its notes say so.
        warnings.simplefilter("ignore", CoupledBatchWarning)
        return capture(
            module,
            source.args,
            dict(source.kwargs),
            targets=source.targets,
            loss_fn=source.loss_fn,
            name=job.name or type(module).__name__,
            **source.capture_options,
        )


class Source:
    """Where graph and costs come from: a model, or a file with costs of its own.

    Args:
        model: ``zoo:NAME``, ``file.py:factory``, or the file of a captured graph (``.json``).
        graph: A published profile or a plain cost graph.
        profiled_batch: Samples of the mini-batch that a profile of PipeDream was taken with;
            the file does not say it.

    Raises:
        InputError: Unless exactly one of model and graph is given.
    """

    def __init__(
        self, model: str | None, graph: Path | None, profiled_batch: int | None = None
    ) -> None:
        if (model is None) == (graph is None):
            raise InputError(
                "What to plan for is not clear",
                expected="a MODEL or --graph FILE",
                got="neither" if model is None else "both",
            )
        self._model = model
        self._path = graph
        self._profiled_batch = profiled_batch

    @cached_property
    def _captured(self) -> tuple[ModelGraph, int | None]:
        """Graph and usual batch size of the model."""
        assert self._model is not None
        if self._model.endswith(".json"):
            return ModelGraph.load(self._model), None
        job = load_job(self._model)
        return capture_job(job), job.batch_size

    @cached_property
    def _file(self) -> GraphFile:
        assert self._path is not None
        return load_graph_file(self._path, profiled_batch=self._profiled_batch)

    def problem(
        self,
        hardware: Hardware,
        *,
        batch_size: int | None = None,
        costs: Path | None = None,
        optimizer: str = "adamw",
        precision: str = "fp32",
    ) -> Problem:
        """The input of a planner.

        Args:
            hardware: The devices. What a graph file says of them is its default.
            batch_size: B, samples; by default what the job or the file says.
            costs: A cost table's file; estimated for the cluster's devices if None.
            optimizer: For the estimate.
            precision: For the estimate.

        Raises:
            InputError: If nothing says how large the mini-batch is.
            GraphPipeError: Whatever is wrong with model, files or devices.
        """
        if self._path is not None:
            return self._from_file(hardware, batch_size, costs)
        cluster = hardware.build()
        graph, usual = self._captured
        size = self._size(batch_size, usual)
        if costs is not None:
            table = CostTable.load(costs)
            table.check(graph)
        else:
            table = estimate(graph, cluster, optimizer=optimizer, precision=precision)
        return Problem(graph, table, cluster, size)

    def _from_file(self, hardware: Hardware, batch_size: int | None, costs: Path | None) -> Problem:
        if hardware.cluster is not None or hardware.device is not None or costs is not None:
            raise ClusterError(
                "A published graph has times of its own kind of device",
                got="--graph with --cluster, --device or --costs",
                fix="Give --devices alone (and --memory)",
            )
        graph, table, defaults = self._file
        cluster = defaults.cluster(devices=hardware.devices, memory_bytes=hardware.memory_bytes)
        return Problem(graph, table, cluster, self._size(batch_size, defaults.mini_batch))

    def _size(self, given: int | None, usual: int | None) -> int:
        size = given if given is not None else usual
        if size is None:
            raise InputError(
                "The size of the mini-batch is not known",
                where=self._model or str(self._path),
                fix="Give --batch-size, the samples of one optimizer step over all devices",
            )
        return size


def summary(graph: ModelGraph) -> str:
    """A graph in a few lines."""
    trainable = sum(p.numel for p in graph.parameters if p.trainable and not p.is_buffer)
    frozen = sum(p.numel for p in graph.parameters if not p.trainable and not p.is_buffer)
    inputs = ", ".join(f"{item.path} {list(item.spec.shape)}" for item in graph.inputs)
    terms = ", ".join(f"{term.op} ({term.reduction})" for term in graph.loss_terms)
    coupled = [op.name for op in graph.ops if op.coupled]
    lines = [
        f"{graph.name}: {len(graph.ops)} operators, {trainable:,} trainable parameters"
        + (f", {frozen:,} frozen" if frozen else ""),
        f"inputs: {inputs}",
        f"loss: {terms or 'none'}",
    ]
    if coupled:
        shown = ", ".join(coupled[:6]) + (", ..." if len(coupled) > 6 else "")
        lines.append(f"operators that mix the samples of a micro-batch: {shown}")
    return "\n".join(lines)
