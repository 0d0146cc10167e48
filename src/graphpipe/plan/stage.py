"""Stages and the edges between them, as records of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from graphpipe.records import Record

if TYPE_CHECKING:
    from typing import Self


MOST_BYTES = 2.0**60
"""No message is larger; more in a file is damage."""


class TaskTimes(Record):
    """Predicted nanoseconds of one task of full micro-batch size on one kind of device.

    ``backward_ns`` includes the recomputation where the stage recomputes; 0 for a stage
    without a backward.
    """

    forward_ns: int = Field(ge=0)
    backward_ns: int = Field(default=0, ge=0)


class StageMemory(Record):
    """Predicted bytes on each device that hosts a replica of the stage.

    ``saved_per_micro_batch`` is kept by each micro-batch between its forward and its
    backward (with recomputation: the stage's inputs only); ``recompute`` is the extra peak
    while one micro-batch is recomputed; ``workspace`` is transient.
    """

    parameters: int = Field(default=0, ge=0)
    gradients: int = Field(default=0, ge=0)
    optimizer: int = Field(default=0, ge=0)
    saved_per_micro_batch: int = Field(default=0, ge=0)
    recompute: int = Field(default=0, ge=0)
    workspace: int = Field(default=0, ge=0)

    @property
    def static(self) -> int:
        return self.parameters + self.gradients + self.optimizer


class Stage(Record):
    """A set of ops that run together. The stage's id is its position in ``Plan.stages``.

    Attributes:
        name: Short, for people: from the modules it holds.
        ops: Names of its ops, in the graph's order; prep ops are not listed.
        modules: Paths of the modules whose ops it holds, for people: see ``modules_of``.
        micro_batch: b_s, samples of one task on one replica.
        replicas: r_s; replica q runs the micro-batches i with i mod r_s = q.
        devices: Ranks; replica q of copy c runs on ``devices[c * replicas + q]``.
        block: k_s of kFkB: so many forwards, then so many backwards.
        in_flight: W_s, samples of one copy whose forward has started and whose backward has
            not ended, over all its replicas; a multiple of b_s r_s unless it is B/R.
        has_backward: False for a frozen stage.
        recompute: Keep only the stage's inputs and run the forward again in the backward.
        times: Predicted times by kind of device.
        memory: Predicted memory per device.
    """

    name: str
    ops: tuple[str, ...] = Field(min_length=1)
    modules: tuple[str, ...] = ()
    micro_batch: int = Field(ge=1)
    replicas: int = Field(default=1, ge=1)
    devices: tuple[int, ...] = Field(min_length=1)
    block: int = Field(default=1, ge=1)
    in_flight: int = Field(ge=1)
    has_backward: bool = True
    recompute: bool = False
    times: dict[str, TaskTimes] = Field(default_factory=dict)
    memory: StageMemory = StageMemory()

    @property
    def quantum(self) -> int:
        """q_s = r_s b_s k_s, samples."""
        return self.replicas * self.micro_batch * self.block

    def device_of(self, copy: int, micro_batch: int) -> int:
        """The rank that runs micro-batch number ``micro_batch`` of copy ``copy``."""
        return self.devices[copy * self.replicas + micro_batch % self.replicas]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if len(set(self.devices)) != len(self.devices):
            raise ValueError(f"stage {self.name!r} lists a device twice: {self.devices}")
        if len(self.devices) % self.replicas:
            raise ValueError(
                f"stage {self.name!r} has {len(self.devices)} devices for {self.replicas} replicas"
            )
        return self


class EdgeTensor(Record):
    """A tensor that passes from one stage to another.

    ``rows_per_sample`` is c where dimension 0 is c * b; None for a tensor without a batch
    dimension: it is the same for every micro-batch, so consumer micro-batch j takes it from
    the producer micro-batch that holds j's first sample, and gives its gradient back there.
    ``shape`` is the shape for one sample, dimension 0 included.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    rows_per_sample: int | None = 1
    has_gradient: bool = True
    bytes_per_sample: float = Field(default=0.0, ge=0, le=MOST_BYTES)
    fixed_bytes: float = Field(default=0.0, ge=0, le=MOST_BYTES)
    gradient_bytes_per_sample: float = Field(default=0.0, ge=0, le=MOST_BYTES)
    gradient_fixed_bytes: float = Field(default=0.0, ge=0, le=MOST_BYTES)


class StageEdge(Record):
    """All tensors that stage ``target`` reads from stage ``source``."""

    source: int = Field(ge=0)
    target: int = Field(ge=0)
    tensors: tuple[EdgeTensor, ...] = Field(min_length=1)

    @property
    def has_gradient(self) -> bool:
        return any(tensor.has_gradient for tensor in self.tensors)
