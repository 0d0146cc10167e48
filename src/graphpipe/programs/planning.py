"""From what a user names to a plan: capture, costs, cluster, search."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from graphpipe.cost.analytic import estimate
from graphpipe.cost.boxes import named_cluster
from graphpipe.cost.cluster import Cluster
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

    def build(self) -> Cluster:
        """The cluster.

        Raises:
            ClusterError: If the options contradict one another or do not say enough.
        """
        memory = None if self.memory_gib is None else round(self.memory_gib * GIB)
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
            return found.model_copy(update={"devices": devices})
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


def problem_of_model(
    model: str,
    hardware: Hardware,
    *,
    batch_size: int | None,
    costs: Path | None,
    optimizer: str,
    precision: str,
) -> Problem:
    """Captures a model, or reads its graph, and finds its costs.

    Args:
        model: ``zoo:NAME``, ``file.py:factory``, or the file of a captured graph (``.json``).
        hardware: The devices.
        batch_size: B, samples; the job's own if None.
        costs: A cost table's file; estimated for the cluster's devices if None.
        optimizer: For the estimate.
        precision: For the estimate.

    Raises:
        InputError: If nothing says how large the mini-batch is.
        GraphPipeError: Whatever is wrong with model, costs or devices.
    """
    cluster = hardware.build()
    if model.endswith(".json"):
        graph, usual = ModelGraph.load(model), None
    else:
        job = load_job(model)
        graph, usual = capture_job(job), job.batch_size
    size = batch_size if batch_size is not None else usual
    if size is None:
        raise InputError(
            "The size of the mini-batch is not known",
            where=model,
            fix="Give --batch-size, the samples of one optimizer step over all devices",
        )
    if costs is not None:
        table = CostTable.load(costs)
        table.check(graph)
    else:
        table = estimate(graph, cluster, optimizer=optimizer, precision=precision)
    return Problem(graph, table, cluster, size)


def problem_of_graph_file(path: Path, hardware: Hardware, *, batch_size: int | None) -> Problem:
    """Reads a published profile or a plain cost graph; options replace what the file says.

    Raises:
        ClusterError: If devices of a kind are asked for: the file's times are of its own kind.
        InputError: If neither the file nor the user says how large the mini-batch is.
        FileFormatError: If the file is malformed.
    """
    if hardware.cluster is not None or hardware.device is not None:
        raise ClusterError(
            "A published graph has times of its own kind of device",
            got="--graph with --cluster or --device",
            fix="Give --devices alone (and --memory)",
        )
    found = load_graph_file(path)
    memory = None if hardware.memory_gib is None else round(hardware.memory_gib * GIB)
    cluster = found.defaults.cluster(devices=hardware.devices, memory_bytes=memory)
    size = batch_size if batch_size is not None else found.defaults.mini_batch
    if size is None:
        raise InputError(
            "The graph file does not say how large the mini-batch is",
            where=str(path),
            fix="Give --batch-size",
        )
    return Problem(found.graph, found.costs, cluster, size)
