"""Reads the index of a checkpoint of ``torch.distributed.checkpoint`` without running anything.

That index is a pickle, and a pickle may name any function to call. Here only the classes that
such an index consists of can be named; everything else is refused before it is even imported.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}


class _IndexUnpickler(pickle.Unpickler):
    """Finds the names of :data:`_CLASSES`, dtypes and ``torch.Size``, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch":
            value = getattr(torch, name, None)
            if isinstance(value, torch.dtype) or value is torch.Size:
                return value
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no such index needs")


class SafeReader(FileSystemReader):
    """Reads checkpoints of ``torch.distributed.checkpoint``; their tensors are loaded with
    ``weights_only=True``.

    Raises:
        pickle.UnpicklingError: from :meth:`read_metadata`, if the index names anything else
            than an index consists of.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index."""
        with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as stream:
            found = _IndexUnpickler(stream).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it is a {type(found).__name__}, and no index")
        for place in (found.storage_data or {}).values():
            name = getattr(place, "relative_path", None)
            if not isinstance(name, str) or Path(name).name != name:
                raise pickle.UnpicklingError(f"it names a file outside of the folder, {name!r}")
        if getattr(found, "storage_meta", None) is None:
            found.storage_meta = StorageMeta()
        assert found.storage_meta is not None
        found.storage_meta.load_id = self.load_id
        return found
