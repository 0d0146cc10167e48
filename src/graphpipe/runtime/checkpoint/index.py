"""The index of a checkpoint: which tensors there are, where their bytes lie, and the rest.

Everything that decides where bytes are read is validated here, before any of them is: a
changed index can neither lead out of the checkpoint's folder nor leave part of a tensor
unwritten.
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator

from graphpipe.records import FileRecord, Record

Section = Literal["model", "buffer", "optimizer"]
"""``model``: what ``model.state_dict()`` has; ``buffer``: non-persistent buffers; ``optimizer``:
what the optimizer keeps for a parameter."""
Size = Annotated[int, Field(ge=0, lt=2**48)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^(model|training)-\d{5,}\.safetensors$")]


class Chunk(Record):
    """A block of a tensor.

    Attributes:
        offsets: Of its first element in the whole tensor.
        shape: Of the block.
        file: In the checkpoint's folder.
        key: Its name in the file.
        sha256: Of its bytes, row-major.
    """

    offsets: tuple[Size, ...]
    shape: tuple[Size, ...]
    file: FileName
    key: str
    sha256: Sha256


class TensorEntry(Record):
    """A tensor: the name that it has in the model, and its blocks.

    Attributes:
        section: What it is.
        name: Canonical name of the parameter or buffer.
        key: What of the parameter's optimizer state, such as ``exp_avg``; else empty.
        dtype: As ``str(torch.dtype)`` without the module.
        shape: Of the whole tensor.
        chunks: Blocks that cover it, each element once.
    """

    section: Section
    name: str
    key: str = ""
    dtype: str
    shape: tuple[Size, ...]
    chunks: tuple[Chunk, ...]

    @property
    def label(self) -> str:
        """Unique in an index."""
        return f"{self.section}:{self.key}:{self.name}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @model_validator(mode="after")
    def _covered(self) -> Self:
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"'{self.dtype}' is no dtype")
        elements = 0
        for chunk in self.chunks:
            if not len(chunk.offsets) == len(chunk.shape) == len(self.shape):
                raise ValueError(f"a block of {self.name} has another number of dimensions")
            ends = map(sum, zip(chunk.offsets, chunk.shape, strict=True))
            if any(end > size for end, size in zip(ends, self.shape, strict=True)):
                raise ValueError(f"a block of {self.name} reaches beyond the tensor")
            elements += math.prod(chunk.shape)
        if not self.chunks or elements != math.prod(self.shape):
            raise ValueError(f"the blocks of {self.name} do not make up the whole tensor")
        for one, other in itertools.combinations(self.chunks, 2):
            if _overlap(one, other):
                raise ValueError(f"two blocks of {self.name} overlap")
        return self


class GroupEntry(Record):
    """A parameter group of the optimizer.

    Attributes:
        position: Among the groups of its rank.
        options: Learning rate and the like, encoded.
        schedule: For each scheduler, what it keeps for this group, encoded.
        parameters: Canonical names.
    """

    position: Size
    options: dict[str, Any]
    schedule: tuple[dict[str, Any], ...] = ()
    parameters: tuple[str, ...] = ()


class OptimizerEntry(Record):
    """The optimizer without its tensors.

    Attributes:
        type: Name of its class.
        groups: All groups of all ranks, equal ones merged.
        values: What it keeps for a parameter and is no tensor, encoded, by name and key.
    """

    type: str
    groups: tuple[GroupEntry, ...]
    values: dict[str, dict[str, Any]]


class TrainingEntry(Record):
    """How far training is.

    Attributes:
        iterations: Mini-batches run.
        seed: Of random ops.
        optimizer: None where there was none.
        schedulers: State of each, encoded, without what it keeps for each group.
        scheduler_types: Name of the class of each.
        scale: State of the loss scaling, encoded.
        random: State of the random generators of each process, encoded, by rank.
        data: The user's position in the data, encoded.
    """

    iterations: Size
    seed: int
    optimizer: OptimizerEntry | None = None
    schedulers: tuple[dict[str, Any], ...] = ()
    scheduler_types: tuple[str, ...] = ()
    scale: dict[str, Any] | None = None
    random: dict[str, dict[str, Any]] = Field(default_factory=dict)
    data: Any = None


class Index(FileRecord):
    """The index of a checkpoint.

    Attributes:
        model: Name of the model, for messages.
        fingerprint: Of the graph that was trained, for messages.
        world_size: Ranks that wrote it.
        tensors: All tensors.
        aliases: By canonical name the other names of a tied parameter.
        training: How far training is.
    """

    file_kind: ClassVar[str] = "checkpoint"
    file_version: ClassVar[int] = 1

    kind: str = "checkpoint"
    version: int = 1
    model: str
    fingerprint: str
    world_size: Annotated[int, Field(ge=1)]
    tensors: tuple[TensorEntry, ...]
    aliases: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    training: TrainingEntry

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        labels: set[str] = set()
        for entry in self.tensors:
            if entry.label in labels:
                raise ValueError(f"two tensors are called {entry.label}")
            labels.add(entry.label)
        places = [(chunk.file, chunk.key) for entry in self.tensors for chunk in entry.chunks]
        if len(set(places)) != len(places):
            raise ValueError("two blocks lie in one place")
        names = {entry.name for entry in self.tensors if entry.section == "model"}
        others = [name for aliases in self.aliases.values() for name in aliases]
        if len(set(others)) != len(others) or names.intersection(others):
            raise ValueError("an alias is used twice")
        if not self.aliases.keys() <= names:
            raise ValueError("an alias belongs to no tensor")
        return self

    def section(self, section: Section) -> dict[str, TensorEntry]:
        """The tensors of a section by name (the last, where a name has several keys)."""
        return {entry.name: entry for entry in self.tensors if entry.section == section}


def _overlap(one: Chunk, other: Chunk) -> bool:
    if 0 in one.shape or 0 in other.shape:
        return False
    return all(
        a < b + m and b < a + n
        for a, n, b, m in zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    )
