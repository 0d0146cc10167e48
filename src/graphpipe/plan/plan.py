"""``Plan``: everything that simulation, execution and reports need, as one JSON file."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from pydantic import Field

from graphpipe.cost.cluster import Cluster
from graphpipe.graph.model_graph import JoinSplit
from graphpipe.plan.schedule import Schedule
from graphpipe.plan.stage import Stage, StageEdge
from graphpipe.records import FileRecord, Record


class ReduceGroup(Record):
    """Parameters whose gradients are summed over the same ranks before the optimizer step."""

    ranks: tuple[int, ...] = Field(min_length=2)
    parameters: tuple[str, ...] = Field(min_length=1)
    nbytes: int = Field(ge=0)


class InputSignature(Record):
    """One input tensor of the captured graph: see ``GraphInput``."""

    name: str
    path: str
    shape: tuple[int | str, ...]
    dtype: str
    per_sample: bool = True
    stages: tuple[int, ...] = ()
    """Stages that read it."""


class Prediction(Record):
    """What the simulator said of the plan, times in nanoseconds, memory in bytes."""

    iteration_ns: int = Field(ge=0)
    bottleneck_ns: int = Field(default=0, ge=0)
    """Busy time of the busiest device within the iteration."""
    bubble: float = Field(default=0.0, ge=0, le=1)
    """Idle share of all used devices over the iteration."""
    depth: int = Field(default=0, ge=0)
    communication_ns: int = Field(default=0, ge=0)
    all_reduce_ns: int = Field(default=0, ge=0)
    optimizer_ns: int = Field(default=0, ge=0)
    peak_memory: tuple[int, ...] = ()
    """Peak bytes of each rank."""
    lower_bound_ns: int = Field(default=0, ge=0)
    """No plan for this input can be faster; 0 where it was not computed."""


class Plan(FileRecord):
    """A graph of stages with devices, micro-batch sizes, schedule and prediction.

    ``Plan`` is checked in two steps: the JSON schema when it is read, and
    ``graphpipe.plan.validate`` (ops, convexity, devices, memory, schedule, deadlock)
    before it is simulated or run.
    """

    file_kind: ClassVar[str] = "graphpipe-plan"
    written_by: ClassVar[str] = "graphpipe plan MODEL -o FILE"
    file_version: ClassVar[int] = 1

    kind: str = file_kind
    version: int = file_version
    model: str = ""
    fingerprint: str = ""
    """``ModelGraph.fingerprint`` of the graph that was planned."""
    split_joins: tuple[JoinSplit, ...] = ()
    """Joins that were split in that graph; a run splits them in its own capture as well."""
    batch_size: int = Field(ge=1, le=2**40)
    """B, samples of a mini-batch over all copies."""
    copies: int = Field(default=1, ge=1)
    cluster: Cluster
    stages: tuple[Stage, ...] = Field(min_length=1)
    edges: tuple[StageEdge, ...] = ()
    inputs: tuple[InputSignature, ...] = ()
    reduce_groups: tuple[ReduceGroup, ...] = ()
    optimizer_ns: tuple[int, ...] = ()
    """Predicted optimizer step of each rank; empty: none."""
    static_memory: tuple[int, ...] = ()
    """Bytes of parameters, gradients and optimizer state on each rank, every parameter once
    although several stages of the rank may hold it; empty: the sum over the rank's stages."""
    schedule: Schedule
    prediction: Prediction | None = None
    planner: str = ""
    """Which planner made it: ``gpp``, ``pipedream``, ``piper``, ..., ``manual``."""
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks of a run: every device of the cluster, idle ones included."""
        return self.cluster.world_size

    @cached_property
    def idle_devices(self) -> tuple[int, ...]:
        """Ranks that host no stage."""
        used = {rank for stage in self.stages for rank in stage.devices}
        return tuple(rank for rank in range(self.world_size) if rank not in used)

    @cached_property
    def in_edges(self) -> tuple[tuple[StageEdge, ...], ...]:
        """Edges that end in each stage, by stage id."""
        return tuple(
            tuple(edge for edge in self.edges if edge.target == i) for i in range(len(self.stages))
        )

    @cached_property
    def out_edges(self) -> tuple[tuple[StageEdge, ...], ...]:
        """Edges that start in each stage, by stage id."""
        return tuple(
            tuple(edge for edge in self.edges if edge.source == i) for i in range(len(self.stages))
        )

    def static_bytes(self, rank: int) -> int:
        """Bytes of parameters, gradients and optimizer state on a rank."""
        if self.static_memory:
            return self.static_memory[rank]
        return sum(self.stages[i].memory.static for i in self.stages_of_device[rank])

    @cached_property
    def stages_of_device(self) -> tuple[tuple[int, ...], ...]:
        """Stage ids that each rank hosts."""
        return tuple(
            tuple(i for i, stage in enumerate(self.stages) if rank in stage.devices)
            for rank in range(self.world_size)
        )

    def __str__(self) -> str:
        """A table of stages and edges, with what bounds the iteration."""
        from graphpipe.plan.text import render

        return render(self)

    def to_dot(self) -> str:
        """The stage graph in the DOT language of Graphviz."""
        from graphpipe.plan.dot import to_dot

        return to_dot(self)
