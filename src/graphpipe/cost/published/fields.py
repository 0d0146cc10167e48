"""Strict reading of foreign JSON: every complaint names the id and the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from graphpipe.errors import FileFormatError

LARGEST = 1e18
"""Numbers beyond this are no cost of anything; they would only overflow later."""


@dataclass(frozen=True)
class Fields:
    """One JSON object, and where it stands: ``profile.json, node 'b'``."""

    values: Mapping[str, object]
    where: str

    def fail(self, field: str, what: str, *, expected: object = None) -> NoReturn:
        """Raises the error for a field."""
        place = f"{self.where}, field '{field}'"
        if field not in self.values:
            raise FileFormatError("A field is missing", where=place, expected=expected)
        shown = repr(self.values[field])
        got = shown if len(shown) <= 60 else shown[:57] + "..."
        raise FileFormatError(what, where=place, expected=expected, got=got)

    def number(self, field: str, *, default: float | None = None) -> float:
        """A finite number that is not negative.

        Args:
            field: Its name.
            default: What holds where it is missing; None: it must be there.
        """
        wanted = "a finite number of at least 0"
        if field not in self.values:
            if default is None:
                self.fail(field, "", expected=wanted)
            return default
        value = self.values[field]
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(field, "A cost is not a number", expected=wanted)
        if isinstance(value, float) and not math.isfinite(value):
            self.fail(field, "A cost is not finite", expected=wanted)
        if value < 0:
            self.fail(field, "A cost is negative", expected=wanted)
        if value > LARGEST:
            self.fail(field, "A cost is absurdly large", expected=f"at most {LARGEST:g}")
        return float(value)

    def positive(self, field: str) -> float | None:
        """A positive number, at least a millionth, or None where it is missing or null."""
        if self.values.get(field) is None:
            return None
        value = self.number(field)
        if value < 1e-6:
            self.fail(field, "A quantity must be positive", expected="at least 1e-06, or null")
        return value

    def count(self, field: str, *, largest: int) -> int | None:
        """A whole number of at least 1, or None where it is missing or null."""
        wanted = f"a whole number from 1 to {largest}"
        value = self.values.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(field, "A count is not a number", expected=wanted)
        if isinstance(value, float) and not value.is_integer():  # also nan and inf
            self.fail(field, "A count is not a whole number", expected=wanted)
        if not 1 <= value <= largest:
            self.fail(field, "A count is out of range", expected=wanted)
        return int(value)

    def text(self, field: str, *, default: str = "") -> str:
        """A string."""
        value = self.values.get(field, default)
        if not isinstance(value, str):
            self.fail(field, "Not a text", expected="a string")
        return value

    def identity(self, field: str) -> str:
        """An id: a whole number or a string that is not empty, as text."""
        value = self.values.get(field)
        if isinstance(value, bool) or not isinstance(value, int | str) or str(value) == "":
            self.fail(field, "Not an id", expected="a whole number or a string")
        return str(value)

    def flag(self, field: str) -> bool:
        """True, false, 0 or 1; false where it is missing."""
        value = self.values.get(field, False)
        if value not in (True, False, 0, 1) or not isinstance(value, int):
            self.fail(field, "Not a flag", expected="true, false, 0 or 1")
        return bool(value)

    def table(self, field: str) -> Fields:
        """An object."""
        value = self.values.get(field)
        if not isinstance(value, dict):
            self.fail(field, "Not an object", expected="an object")
        return Fields(value, f"{self.where}, field '{field}'")

    def items(self, field: str) -> list[object]:
        """A list."""
        value = self.values.get(field)
        if not isinstance(value, list):
            self.fail(field, "Not a list", expected="a list")
        return value

    def objects(self, field: str, kind: str) -> list[Fields]:
        """A list of objects, each placed by its position until its id is known."""
        found: list[Fields] = []
        for i, value in enumerate(self.items(field)):
            if not isinstance(value, dict):
                raise FileFormatError(
                    f"A {kind} is not an object", where=f"{self.where}, {field}[{i}]", got=value
                )
            found.append(Fields(value, f"{self.where}, {field}[{i}]"))
        return found


def parse_json(text: bytes, where: str) -> Fields:
    """The object of a JSON text.

    Raises:
        FileFormatError: if the text is truncated or malformed, names a key twice in one
            object, or is not an object.
    """
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise FileFormatError("The file nests too deeply", where=where) from None
    except ValueError as error:
        raise FileFormatError(
            "The file is not valid JSON; it may be truncated", where=where, got=str(error)
        ) from None
    if not isinstance(value, dict):
        raise FileFormatError("The file is not a JSON object", where=where)
    return Fields(value, where)


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"field {key!r} is there twice in one object")
            seen.add(key)
    return found
