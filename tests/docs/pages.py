"""The pages of the documentation and the code blocks in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)

_FENCE = re.compile(r"^```([a-z]+)[ \t]*\n(.*?)^```[ \t]*$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text and the line of the page where it starts."""

    language: str
    text: str
    page: Path
    line: int


def blocks(page: Path, language: str) -> list[Block]:
    """The blocks of a page in one language, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(found[1], found[2], page, text.count("\n", 0, found.start()) + 2)
        for found in _FENCE.finditer(text)
        if found[1] == language
    ]


def pages_with(language: str) -> list[Path]:
    """Pages that have a block in the language."""
    return [page for page in PAGES if blocks(page, language)]


def name(page: Path) -> str:
    """The page's name within the documentation, for test ids."""
    return page.relative_to(DOCS).with_suffix("").as_posix()
