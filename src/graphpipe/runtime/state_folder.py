"""Initial values from folders: distributed checkpoints of PyTorch, and our own checkpoints.

Both are read one tensor at a time, by the model's names, so that a rank never holds the
parameters of a stage that it does not run.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from graphpipe.errors import CheckpointError
from graphpipe.runtime.checkpoint.folder import INDEX, complete_checkpoints, locate, read_index
from graphpipe.runtime.checkpoint.plain import read_tensors
from graphpipe.runtime.metadata_pickle import SafeReader
from graphpipe.runtime.state import FileState, StateSource

METADATA = ".metadata"
"""File that makes a folder a checkpoint of ``torch.distributed.checkpoint``."""


def state_at(
    path: str | os.PathLike[str], fallback: StateSource, aliases: Mapping[str, Sequence[str]]
) -> StateSource:
    """The values at a path, whatever kind of file or folder that is.

    Args:
        path: A safetensors file, a folder of them, a distributed checkpoint of PyTorch, or what
            ``Pipeline.save`` wrote.
        fallback: Asked for names that are not there (non-persistent buffers, constants).
        aliases: By canonical name, other names of tied parameters.

    Raises:
        CheckpointError: if there is nothing of the kind, or it is damaged.
    """
    target = Path(path)
    if (target / METADATA).is_file():
        return DistributedState(target, fallback, aliases)
    if (target / INDEX).is_file() or (target.is_dir() and complete_checkpoints(target)):
        return CheckpointState(target, fallback)
    return FileState(target, fallback, aliases)


class DistributedState:
    """Values of a checkpoint that ``torch.distributed.checkpoint.save`` wrote.

    Its keys are the model's names, alone or behind one prefix: ``save({"model":
    model.state_dict()})`` writes ``model.NAME``. Other keys, such as an optimizer's state, are
    not read. Arguments as in :func:`state_at`.

    Raises:
        CheckpointError: if its index cannot be read.
    """

    def __init__(
        self, path: Path, fallback: StateSource, aliases: Mapping[str, Sequence[str]]
    ) -> None:
        self._path = path
        self._fallback = fallback
        self._aliases = aliases
        try:
            entries = SafeReader(path).read_metadata().state_dict_metadata
        except Exception as error:  # what it holds is a pickle: anything may go wrong
            raise CheckpointError(
                f"Cannot read the index of the distributed checkpoint: {error}",
                where=str(path / METADATA),
                fix="Write it again with torch.distributed.checkpoint.save",
            ) from None
        self._entries = {
            key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
        }
        self._prefix = self._common_prefix()

    def _common_prefix(self) -> str:
        """What stands before the model's names: the prefix under which most of them are found,
        and of those the shortest."""
        names = {name: (name, *others) for name, others in self._aliases.items()}
        prefixes = {
            key.removesuffix(name)
            for known in names.values()
            for name in known
            for key in self._entries
            if key == name or key.endswith(f".{name}")
        }

        def found(prefix: str) -> int:
            return sum(
                any(prefix + name in self._entries for name in known) for known in names.values()
            )

        return min(prefixes, key=lambda prefix: (-found(prefix), len(prefix), prefix), default="")

    def tensor(self, name: str) -> torch.Tensor:
        for key in (name, *self._aliases.get(name, ())):
            entry = self._entries.get(self._prefix + key)
            if entry is None:
                continue
            value = torch.empty(entry.size, dtype=entry.properties.dtype)
            try:
                with warnings.catch_warnings():
                    # "Assuming the intent is to load in a single process": it is.
                    warnings.simplefilter("ignore", UserWarning)
                    load(
                        {self._prefix + key: value},
                        storage_reader=SafeReader(self._path),
                        no_dist=True,
                    )
            except (CheckpointException, OSError, RuntimeError) as error:
                raise CheckpointError(
                    f"Cannot read a tensor of the distributed checkpoint: {error}",
                    where=f"{self._path}, {self._prefix + key}",
                ) from None
            return value
        return self._fallback.tensor(name)


class CheckpointState:
    """Parameters and buffers of a checkpoint that ``Pipeline.save`` wrote, under any plan.

    Raises:
        CheckpointError: if there is no complete checkpoint, or it is damaged.
    """

    def __init__(self, path: Path, fallback: StateSource) -> None:
        self._folder = locate(path)
        self._fallback = fallback
        index, _ = read_index(self._folder)
        self._entries = {
            entry.name: entry for entry in index.tensors if entry.section in ("model", "buffer")
        }

    def tensor(self, name: str) -> torch.Tensor:
        entry = self._entries.get(name)
        if entry is None:
            return self._fallback.tensor(name)
        ((_, value),) = read_tensors(self._folder, [entry])
        return value
