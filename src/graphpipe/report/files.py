"""Writing what is meant for people and other tools."""

from __future__ import annotations

import os
from pathlib import Path

from graphpipe.errors import FileFormatError


def write_text(path: str | os.PathLike[str], text: str, *, what: str) -> None:
    """Writes a text file as UTF-8.

    Args:
        path: Where to.
        text: Its content.
        what: What it is, for the message: ``the report``.

    Raises:
        FileFormatError: if it cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileFormatError(
            f"Cannot write {what}: {error.strerror or error}",
            where=str(path),
            fix="Give a path in a folder that exists and that you may write to",
        ) from None
