"""Planner and storage that ``torch.distributed.checkpoint`` drives in every rank.

Each rank offers the blocks that it owns and writes them to files of its own; the coordinator
brings the facts of all ranks together in one index. On loading, each rank asks for the blocks
that it needs, whatever blocks were saved, and only reads the files that have them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from graphpipe.errors import CheckpointError
from graphpipe.runtime.checkpoint.folder import sync_file, sync_folder
from graphpipe.runtime.checkpoint.index import Chunk, Index, TensorEntry
from graphpipe.runtime.checkpoint.pieces import Piece

_FILES = {"model": "model", "buffer": "training", "optimizer": "training"}
"""Kind of file that a section lies in: the files ``model-*`` hold what ``state_dict()`` has."""


def checksum(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes, row-major."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class PieceSavePlanner(SavePlanner):
    """Offers this rank's blocks and facts.

    Args:
        prepare: Gives the blocks that this rank is to write, and its facts for the index.
            Called in DCP's first step, so that an error in it reaches all ranks.
    """

    def __init__(self, prepare: Callable[[], tuple[Sequence[Piece], Any]]) -> None:
        self._prepare = prepare
        self.pieces: list[Piece] = []

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the blocks are not those of a dictionary."""

    def create_local_plan(self) -> SavePlan:
        """The blocks as items, numbered by their ``index``."""
        pieces, facts = self._prepare()
        self.pieces = list(pieces)
        items = [
            WriteItem(
                index=MetadataIndex(piece.label, piece.offsets, index=number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(
                        torch.Size(piece.offsets), torch.Size(piece.tensor.shape)
                    ),
                    properties=TensorProperties(dtype=piece.tensor.dtype),
                    size=torch.Size(piece.whole),
                ),
            )
            for number, piece in enumerate(self.pieces)
        ]
        return SavePlan(items, planner_data=facts)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Hands the facts of all ranks to the storage; every rank writes what it offered."""
        return all_plans, Metadata({}, planner_data=[plan.planner_data for plan in all_plans])

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        number = write_item.index.index
        assert number is not None
        return self.pieces[number].tensor


class FolderWriter(StorageWriter):
    """Writes a rank's blocks to safetensors files, and on the coordinator the index.

    Args:
        planner: The planner of the same save.
        begin: Makes the folder to write into (coordinator).
        finish: Takes the folder, all tensors and all facts, and completes the checkpoint
            (coordinator).
        watch: Told what happens while this rank alone is busy.
    """

    def __init__(
        self,
        planner: PieceSavePlanner,
        begin: Callable[[], Path],
        finish: Callable[[Path, tuple[TensorEntry, ...], Sequence[Any]], None],
        watch: Callable[[str | None], None],
    ) -> None:
        self._planner = planner
        self._begin = begin
        self._finish = finish
        self._watch = watch
        self._rank = 0
        self._folder: Path | None = None

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between saves."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = int(kwargs.get("rank", 0))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Every rank is told the folder."""
        self._folder = self._begin()
        return [dataclasses.replace(plan, storage_data=str(self._folder)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._watch("saving the checkpoint")
        try:
            return _done(self._write(Path(plan.storage_data), plan.items, planner))
        finally:
            self._watch(None)

    def _write(
        self, folder: Path, items: Sequence[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        folder.mkdir(exist_ok=True)  # another machine may not see the coordinator's yet
        files: dict[str, dict[str, torch.Tensor]] = {}
        results: list[WriteResult] = []
        seen: set[int] = set()
        for item in items:
            number = item.index.index
            assert number is not None
            piece = self._planner.pieces[number]
            data = planner.resolve_data(item)
            assert isinstance(data, torch.Tensor)
            tensor = data.cpu().contiguous()
            if tensor.untyped_storage().data_ptr() in seen:
                tensor = tensor.clone()  # the file format refuses tensors that share memory
            seen.add(tensor.untyped_storage().data_ptr())
            name = f"{_FILES[piece.section]}-{self._rank:05d}.safetensors"
            files.setdefault(name, {})[piece.file_key] = tensor
            chunk = Chunk(
                offsets=piece.offsets,
                shape=tuple(tensor.shape),
                file=name,
                key=piece.file_key,
                sha256=checksum(tensor),
            )
            results.append(WriteResult(item.index, tensor.nbytes, (piece_facts(piece), chunk)))
        for name, tensors in files.items():
            try:
                save_file(tensors, folder / name, metadata={"format": "pt"})
                sync_file(folder / name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"Cannot write a file of the checkpoint: {error}", where=str(folder / name)
                ) from None
        sync_folder(folder)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Brings the blocks of all ranks together and completes the checkpoint."""
        assert self._folder is not None
        facts = metadata.planner_data
        metadata.planner_data = None  # DCP sends the metadata to every rank
        found: dict[tuple[str, ...], dict[str, Any]] = {}
        chunks: dict[tuple[str, ...], list[Chunk]] = {}
        for result in (result for rank in results for result in rank):
            about, chunk = result.storage_data
            label = (about["section"], about["name"], about["key"])
            known = found.setdefault(label, about)
            if known != about:
                raise CheckpointError(
                    "Two ranks hold blocks of one tensor with different shapes or dtypes",
                    where=about["name"],
                    expected=known,
                    got=about,
                )
            chunks.setdefault(label, []).append(chunk)
        files = {chunk.file for blocks in chunks.values() for chunk in blocks}
        missing = sorted(file for file in files if not (self._folder / file).is_file())
        if missing:
            raise CheckpointError(
                "A rank wrote a file of the checkpoint that is not in its folder",
                where=str(self._folder / missing[0]),
                fix="Save into a folder that all machines share, and into which no other run saves",
            )
        tensors = tuple(
            TensorEntry(**about, chunks=tuple(sorted(chunks[label], key=lambda c: c.offsets)))
            for label, about in sorted(found.items())
        )
        self._finish(self._folder, tensors, facts)

    @property
    def folder(self) -> Path | None:
        """The folder of a save that began, on the coordinator."""
        return self._folder


def piece_facts(piece: Piece) -> dict[str, Any]:
    """The fields of a :class:`TensorEntry` but the blocks."""
    return {
        "section": piece.section,
        "name": piece.name,
        "key": piece.key,
        "dtype": str(piece.tensor.dtype).removeprefix("torch."),
        "shape": piece.whole,
    }


class PieceLoadPlanner(LoadPlanner):
    """Asks for the blocks that this rank needs.

    Args:
        prepare: Gives the blocks to fill and the checksum of the index that was read. Called
            in DCP's first step, so that an error in it reaches all ranks.
        index: Gives the index; called after ``prepare``.
    """

    def __init__(
        self, prepare: Callable[[], tuple[Sequence[Piece], str]], index: Callable[[], Index]
    ) -> None:
        self._prepare = prepare
        self._index = index
        self._pieces: Sequence[Piece] = ()

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the blocks are not those of a dictionary."""

    def create_local_plan(self) -> LoadPlan:
        """What to read for each block; ``dest_index`` names the block by its number."""
        self._pieces, digest = self._prepare()
        if not self._pieces:
            return LoadPlan([], planner_data=digest)
        entries = {entry.label: entry for entry in self._index().tensors}
        items: list[ReadItem] = []
        for number, piece in enumerate(self._pieces):
            entry = entries[piece.label]
            saved = TensorStorageMetadata(
                TensorProperties(dtype=entry.torch_dtype),
                torch.Size(entry.shape),
                [
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape))
                    for chunk in entry.chunks
                ],
            )
            wanted = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.tensor.shape))
            if math.prod(piece.tensor.shape) == 0:
                continue
            items += [
                dataclasses.replace(item, dest_index=MetadataIndex(str(number), piece.offsets))
                for item in create_read_items_for_chunk_list(piece.label, saved, [wanted])
            ]
        return LoadPlan(items, planner_data=digest)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Makes sure that all ranks read the same checkpoint."""
        if len({plan.planner_data for plan in global_plan}) > 1:
            raise CheckpointError(
                "The ranks found different checkpoints",
                fix="Load from a folder that all machines share",
            )
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("a checkpoint of ours has tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor = self._pieces[int(read_item.dest_index.fqn)].tensor
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: the tensor is the block itself."""


class FolderReader(StorageReader):
    """Reads blocks, and checks the bytes of each against the index.

    Args:
        folder: Gives the checkpoint's folder; called when reading begins.
        index: Gives its index.
        watch: Told what happens while this rank alone is busy.
    """

    def __init__(
        self,
        folder: Callable[[], Path],
        index: Callable[[], Index],
        watch: Callable[[str | None], None],
    ) -> None:
        self._folder = folder
        self._index = index
        self._watch = watch

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between loads."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        # The planner reads the index: DCP would hide an error that is raised here.
        return Metadata({})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if not plan.items:
            return _done(None)
        folder = self._folder()
        entries = {entry.label: entry for entry in self._index().tensors}
        wanted: dict[str, list[tuple[str, int, ReadItem]]] = {}
        for number, item in enumerate(plan.items):
            entry = entries[item.storage_index.fqn]
            offset = item.storage_index.offset
            assert offset is not None
            chunk = next(c for c in entry.chunks if c.offsets == tuple(offset))
            wanted.setdefault(chunk.file, []).append((chunk.key, number, item))
        for file, items in wanted.items():
            self._watch(f"reading {file} of the checkpoint")
            try:
                self._read(folder / file, sorted(items, key=lambda x: x[:2]), entries, planner)
            finally:
                self._watch(None)
        return _done(None)

    def _read(
        self,
        path: Path,
        items: Sequence[tuple[str, int, ReadItem]],
        entries: dict[str, TensorEntry],
        planner: LoadPlanner,
    ) -> None:
        with OpenFile(path) as opened:
            last: tuple[str, torch.Tensor] | None = None
            for key, _, item in items:
                entry = entries[item.storage_index.fqn]
                chunk = next(c for c in entry.chunks if (c.file, c.key) == (path.name, key))
                if last is None or last[0] != key:
                    last = (key, opened.block(entry, chunk))
                part = last[1]
                for dim, (start, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    part = part.narrow(dim, start, length)
                planner.resolve_tensor(item).copy_(part)


def check_sizes(folder: Path, entries: Iterable[TensorEntry]) -> None:
    """Makes sure that the files are as large as their blocks, before memory is set aside.

    Raises:
        CheckpointError: if a file is missing, or too small for a block that the index names.
    """
    sizes: dict[str, int] = {}
    for entry in entries:
        for chunk in entry.chunks:
            if chunk.file not in sizes:
                path = folder / chunk.file
                sizes[chunk.file] = path.stat().st_size if path.is_file() else -1
            if math.prod(chunk.shape) * entry.torch_dtype.itemsize > sizes[chunk.file]:
                raise CheckpointError(
                    f"A file of the checkpoint is damaged: it cannot hold {chunk.key}",
                    where=str(folder / chunk.file),
                    expected=f"{entry.dtype} {list(chunk.shape)}",
                    got=f"{sizes[chunk.file]} bytes" if sizes[chunk.file] >= 0 else "no file",
                    fix="The file was changed or cut off: use another checkpoint",
                )


class OpenFile:
    """A safetensors file of a checkpoint, open for reading.

    Raises:
        CheckpointError: from every method, if the file is missing, truncated or changed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: Any = None

    def __enter__(self) -> OpenFile:
        try:
            opened: Any = safe_open(str(self._path), framework="pt")
            self._opened = opened.__enter__()
        except (SafetensorError, OSError) as error:
            raise self._damaged(str(error)) from None
        return self

    def __exit__(self, *args: Any) -> None:
        self._opened.__exit__(*args)

    def block(self, entry: TensorEntry, chunk: Chunk) -> torch.Tensor:
        """A block whose bytes are those that were saved."""
        try:
            value: torch.Tensor = self._opened.get_tensor(chunk.key)
        except (SafetensorError, OSError) as error:
            raise self._damaged(str(error)) from None
        if tuple(value.shape) != chunk.shape or value.dtype != entry.torch_dtype:
            got = f"{value.dtype} {list(value.shape)}"
            raise self._damaged(f"{chunk.key} is {got} there, and not as the index says")
        if checksum(value) != chunk.sha256:
            raise self._damaged(f"the bytes of {chunk.key} are not those that were saved")
        return value

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"A file of the checkpoint is damaged: {why.splitlines()[0]}",
            where=str(self._path),
            fix="The file was changed or cut off: use another checkpoint",
        )
