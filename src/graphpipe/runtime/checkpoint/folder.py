"""Folders of checkpoints: a save appears whole or not at all, and the newest is found.

A save writes into a hidden folder beside its final place. When every file is on the disk, the
index, then a marker with the index's checksum are written, and the folder gets its name in one
step. A folder without the marker, or whose index does not match it, is never a checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

from graphpipe.errors import CheckpointError, FileFormatError
from graphpipe.runtime.checkpoint.index import Index

INDEX = "index.json"
MARKER = "COMPLETE"
_NAME = re.compile(r"^step-(\d{8,})(?:\.(\d+))?$")
_PARTIAL, _DELETED, _ASIDE = ".partial-", ".deleted-", "set-aside-"


def begin(root: Path) -> Path:
    """A new hidden folder to write a checkpoint into; what earlier saves left half done goes.

    Only one process of a run calls this, and only one run saves into ``root`` at a time.
    """
    root.mkdir(parents=True, exist_ok=True)
    for left in [*root.glob(f"{_PARTIAL}*"), *root.glob(f"{_DELETED}*")]:
        shutil.rmtree(left, ignore_errors=True)
    folder = root / f"{_PARTIAL}{secrets.token_hex(8)}"
    folder.mkdir()
    return folder


def finish(folder: Path, index: Index, step: int, keep: int | None) -> Path:
    """Makes the checkpoint written into ``folder`` appear under its final name.

    Args:
        folder: What :func:`begin` returned, with all tensors on the disk.
        index: Its index.
        step: Optimizer steps, for the name.
        keep: How many checkpoints stay in the root; None: all.

    Returns:
        The checkpoint's final folder.
    """
    text = (index.to_json(indent=None) + "\n").encode()
    write_synced(folder / INDEX, text)
    write_synced(folder / MARKER, hashlib.sha256(text).hexdigest().encode() + b"\n")
    sync_folder(folder)
    root = folder.parent
    target = root / f"step-{step:08d}"
    attempt = 1
    while target.exists():  # a step that was repeated after a failure
        attempt += 1
        target = root / f"step-{step:08d}.{attempt}"
    folder.rename(target)
    _set_aside(root, step)
    sync_folder(root)
    _retain(root, target, step, keep)
    return target


def _set_aside(root: Path, step: int) -> None:
    """Renames checkpoints of later steps: they are of a training that this one does not go on
    from, and the newest checkpoint must be the one that was saved last."""
    for path in complete_checkpoints(root):
        if _order(path)[0] > step:
            aside = root / f"{_ASIDE}{path.name}-{secrets.token_hex(4)}"
            with contextlib.suppress(OSError):
                path.rename(aside)
                warnings.warn(
                    f"{path} is of another training, which was further than step {step}: "
                    f"it is now {aside}",
                    stacklevel=2,
                )


def _retain(root: Path, newest: Path, step: int, keep: int | None) -> None:
    found = [path for path in complete_checkpoints(root) if path != newest]
    same = [path for path in found if _order(path)[0] == step]
    others = [path for path in found if path not in same]
    dropped = same + ([] if keep is None else others[keep - 1 :])
    for path in dropped:
        # Renamed first: half-deleted, it would still have its marker.
        hidden = root / f"{_DELETED}{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):  # it stays; the new checkpoint is good nevertheless
            path.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def discard(folder: Path) -> None:
    """Drops a save that failed."""
    shutil.rmtree(folder, ignore_errors=True)


def complete_checkpoints(root: Path) -> list[Path]:
    """The checkpoints in ``root`` whose index matches its marker, newest first."""
    return list(_complete(root))


def _complete(root: Path) -> Iterator[Path]:
    try:
        named = [path for path in root.iterdir() if _NAME.match(path.name) and path.is_dir()]
    except OSError:
        return
    for path in sorted(named, key=_order, reverse=True):
        if _matches(path):
            yield path


def _order(path: Path) -> tuple[int, int]:
    match = _NAME.match(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _matches(path: Path) -> bool:
    try:
        text = (path / INDEX).read_bytes()
        marker = (path / MARKER).read_bytes()
    except OSError:
        return False
    return marker.strip() == hashlib.sha256(text).hexdigest().encode()


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in ``root``, or None.

    Only the index is checked here; the tensors are when they are read.
    """
    return next(_complete(Path(root)), None)


def nothing_saved(root: Path) -> bool:
    """Whether no checkpoint was ever completed in ``root``, not even one that is damaged now."""
    if not root.is_dir():
        return True
    return not (root / INDEX).exists() and not any(
        _NAME.match(path.name) and (path / MARKER).exists() for path in root.iterdir()
    )


def locate(path: str | os.PathLike[str]) -> Path:
    """The checkpoint that ``path`` names: itself, or the newest complete one in it.

    Raises:
        CheckpointError: if there is none; says what there is instead.
    """
    given = Path(path)
    if (given / INDEX).exists() or (given / MARKER).exists() or _NAME.match(given.name):
        return given
    found = latest_checkpoint(given)
    if found is not None:
        return found
    if not given.is_dir():
        got = "no such folder"
    else:
        broken = [item.name for item in given.iterdir() if _NAME.match(item.name)]
        got = f"only incomplete or damaged ones: {', '.join(sorted(broken)[:3])}" if broken else (
            "none"
        )  # fmt: skip
    raise CheckpointError(
        "There is no complete checkpoint here",
        where=str(given),
        expected="a folder made by Pipeline.save, or one of its checkpoints",
        got=got,
    )


def read_index(checkpoint: Path) -> tuple[Index, str]:
    """The index of a checkpoint, and its checksum.

    Raises:
        CheckpointError: if the save did not end, or the index was changed or is malformed.
    """
    try:
        text = (checkpoint / INDEX).read_bytes()
        marker = (checkpoint / MARKER).read_bytes().strip()
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint is not complete: {error.strerror}",
            where=str(error.filename),
            fix="Its save did not end: use another checkpoint",
        ) from None
    checksum = hashlib.sha256(text).hexdigest()
    if marker != checksum.encode():
        raise CheckpointError(
            "The index of the checkpoint is not the one that was saved",
            where=str(checkpoint / INDEX),
            expected=f"the checksum {marker.decode(errors='replace')[:64]} of {MARKER}",
            got=checksum,
            fix="The file was changed or damaged: use another checkpoint",
        )
    return parse_index(text, str(checkpoint / INDEX)), checksum


def parse_index(text: bytes, where: str) -> Index:
    """Reads an index.

    Raises:
        CheckpointError: naming the field that is wrong.
    """
    try:
        return Index.from_json(text, where=where)
    except FileFormatError as error:
        raise CheckpointError(
            error.what, where=error.where, expected=error.expected, got=error.got,
            fix="The file was changed or damaged: use another checkpoint",
        ) from None  # fmt: skip


def write_synced(path: Path, data: bytes) -> None:
    """Writes a file and waits until it is on the disk."""
    with path.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def sync_file(path: Path) -> None:
    """Waits until a file is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_folder = sync_file
"""Waits until the names in a folder are on the disk."""
