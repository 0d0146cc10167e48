"""Checkpoints outside of a pipeline: in plain PyTorch, as one safetensors file, verified."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from graphpipe.errors import CheckpointError
from graphpipe.runtime.checkpoint.engine import OpenFile, check_sizes
from graphpipe.runtime.checkpoint.folder import locate, read_index
from graphpipe.runtime.checkpoint.index import Index, TensorEntry


def load_state_dict(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of a checkpoint, for ``model.load_state_dict``.

    Args:
        path: Where ``Pipeline.save`` wrote (the newest complete checkpoint), or a checkpoint.

    Returns:
        CPU tensors under the names of ``model.state_dict()``; tied names share a tensor.

    Raises:
        CheckpointError: if there is no complete checkpoint, or it is damaged.
    """
    folder = locate(path)
    index, _ = read_index(folder)
    wanted = list(index.section("model").values())
    found = {entry.name: tensor for entry, tensor in read_tensors(folder, wanted)}
    out: dict[str, torch.Tensor] = {}
    for name, tensor in found.items():
        out.update(dict.fromkeys((name, *index.aliases.get(name, ())), tensor))
    return out


def read_tensors(
    folder: Path, entries: list[TensorEntry]
) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """Whole tensors of a checkpoint, one after the other, every byte checked.

    Raises:
        CheckpointError: if a file is damaged.
    """
    check_sizes(folder, entries)
    for entry in entries:
        whole = torch.empty(entry.shape, dtype=entry.torch_dtype)
        for chunk in entry.chunks:
            with OpenFile(folder / chunk.file) as opened:
                part = whole
                for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.shape, strict=True)):
                    part = part.narrow(dim, start, size)
                part.copy_(opened.block(entry, chunk))
        yield entry, whole


def verify(path: str | os.PathLike[str]) -> Index:
    """Reads every byte of a checkpoint and checks it; returns its index.

    Raises:
        CheckpointError: naming the first file that is damaged.
    """
    folder = locate(path)
    index, _ = read_index(folder)
    for _entry, _tensor in read_tensors(folder, list(index.tensors)):
        pass
    return index


def export(path: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Writes the model of a checkpoint as one safetensors file, under every name it has.

    Args:
        path: As for :func:`load_state_dict`.
        target: The file.

    Raises:
        CheckpointError: if the checkpoint is damaged, or the file cannot be written.
    """
    state = load_state_dict(path)
    file = Path(target)
    half = file.with_name(file.name + ".partial")
    try:
        # Tied names are written apart: the format has no ties.
        apart = {name: value.clone().contiguous() for name, value in state.items()}
        save_file(apart, half, metadata={"format": "pt"})
        half.replace(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"Cannot write the file: {error}",
            where=str(file),
            fix="Give a path in a folder that exists and that you may write to",
        ) from None
    return file
