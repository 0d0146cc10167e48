"""Typed records that travel as JSON files.

Every file that GraphPipe writes is one JSON object with a ``kind`` and a ``version``.
Reading is strict: unknown fields, wrong types, NaN and infinities are refused with the
path of the field. Nothing is ever unpickled.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from graphpipe.errors import FileFormatError


class Record(BaseModel):
    """An immutable, strictly validated record."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class FileRecord(Record):
    """A record that is a file of its own.

    Subclasses set ``file_kind`` and ``file_version`` and declare the fields ``kind`` and
    ``version`` with these values as defaults. ``written_by`` is a command that writes such
    a file, for messages.
    """

    file_kind: ClassVar[str]
    written_by: ClassVar[str] = ""
    file_version: ClassVar[int]

    kind: str
    version: int

    def to_json(self, *, indent: int | None = 1) -> str:
        """The record as JSON text; ``from_json`` of it gives an equal record."""
        return self.model_dump_json(indent=indent, exclude_defaults=False)

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "<string>") -> Self:
        """Parses and validates ``text``.

        Raises:
            FileFormatError: naming the field, what was expected and what was found.
        """
        try:
            record = cls.model_validate_json(text)
        except ValidationError as error:
            what, got = _describe(error, cls.file_kind)
            raise FileFormatError(what, where=where, got=got, fix=cls._remedy()) from None
        except RecursionError:
            raise FileFormatError(
                f"This {cls.file_kind} file nests too deeply", where=where, fix=cls._remedy()
            ) from None
        return record._checked_header(where)

    def _checked_header(self, where: str) -> Self:
        for field, want in (("kind", self.file_kind), ("version", self.file_version)):
            got = getattr(self, field)
            if got != want:
                raise FileFormatError(
                    f"This is not a {self.file_kind} file that this release reads",
                    where=f"{where}, field '{field}'",
                    expected=repr(want),
                    got=repr(got),
                    fix=f"Write the {self.file_kind} again with this release of graphpipe",
                )
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the record to ``path`` in one step: readers never see half a file.

        Raises:
            FileFormatError: if the file cannot be written.
        """
        self._write(Path(path), self.to_json() + "\n")

    def _write(self, target: Path, text: str) -> None:
        try:
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=target.parent, prefix=target.name, delete=False
            ) as out:
                temporary = Path(out.name)
                out.write(text)
        except OSError as error:
            raise self._cannot_write(target, error) from None
        try:
            temporary.chmod(0o644)
            temporary.replace(target)
        except OSError as error:
            temporary.unlink()
            raise self._cannot_write(target, error) from None

    def _cannot_write(self, target: Path, error: OSError) -> FileFormatError:
        return FileFormatError(
            f"Cannot write the {self.file_kind} file: {error.strerror or error}",
            where=str(target),
            fix="Give a path in a folder that exists and that you may write to",
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file written by :meth:`save`.

        Raises:
            FileFormatError: if it cannot be read, naming the field that is wrong.
        """
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise FileFormatError(
                f"Cannot read the {cls.file_kind} file: {error.strerror}",
                where=str(path),
                fix=cls._remedy(),
            ) from None
        return cls.from_json(text, where=str(path))

    @classmethod
    def _remedy(cls) -> str | None:
        return f"'{cls.written_by}' writes such a file" if cls.written_by else None


def _describe(error: ValidationError, kind: str) -> tuple[str, str | None]:
    """The first few problems of a validation error, each with the path of its field.

    Of a text that is no JSON at all, what it begins with is told apart.
    """
    problems: list[str] = []
    details: list[Any] = list(error.errors(include_url=False, include_context=False))
    if details[0]["type"] == "json_invalid":
        text = details[0]["input"]
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
        reason = details[0]["msg"].removeprefix("Invalid JSON: ")
        begins = f"a file that begins with {text[:20]!r}" if text else "an empty file"
        return f"Not a {kind} file, or a damaged one: no valid JSON, {reason}", begins
    for item in details[:3]:
        path = ".".join(str(part) for part in item["loc"]) or "(top level)"
        found = repr(item.get("input"))
        if len(found) > 60:
            found = found[:57] + "..."
        problems.append(f"field '{path}': {item['msg']} (found {found})")
    more = f"; and {len(details) - 3} more" if len(details) > 3 else ""
    return f"Not a valid {kind} file: " + "; ".join(problems) + more, None
