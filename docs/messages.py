"""Finds every error that GraphPipe raises for users, with its words, in the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Message:
    """One ``raise``: the error's class, its text with ``...`` for what varies, its advice."""

    error: str
    text: str
    fix: str
    module: str


def error_names(source: Path) -> set[str]:
    """The classes that ``graphpipe/errors.py`` defines."""
    tree = ast.parse((source / "graphpipe" / "errors.py").read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def messages(source: Path) -> list[Message]:
    """Every message in the sources that is written where the error is made, in order of text."""
    names = error_names(source)
    found: set[Message] = set()
    for path in sorted((source / "graphpipe").rglob("*.py")):
        module = ".".join(path.relative_to(source).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found.update(_in_module(tree, names, module))
    return sorted(found, key=lambda m: (m.text.lower(), m.error, m.module))


def _in_module(tree: ast.Module, names: set[str], module: str) -> Iterator[Message]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id not in names or not node.args:
            continue
        text = _words(node.args[0])
        if text is None or text == "...":
            continue
        advice = [k.value for k in node.keywords if k.arg == "fix"]
        yield Message(node.func.id, text, (_words(advice[0]) or "") if advice else "", module)


def _words(node: ast.expr) -> str | None:
    """The constant words of a text expression; ``...`` stands for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [p.value if isinstance(p, ast.Constant) else "..." for p in node.values]
        return "".join(str(part) for part in parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = (_words(node.left), _words(node.right))
        return None if None in sides else "".join(side or "" for side in sides)
    return None


def index(source: Path) -> str:
    """The index as Markdown: a definition list in the order of the alphabet."""
    lines: list[str] = []
    for message in messages(source):
        lines.append(f"`{_code(message.text)}`")
        advice = f" {_prose(message.fix)}." if message.fix.strip(". ") else ""
        lines.append(f": `{message.error}` of `{message.module}`.{advice}")
        lines.append("")
    return "\n".join(lines)


def _code(text: str) -> str:
    return " ".join(text.split()).replace("`", "'")


def _prose(text: str) -> str:
    plain = _code(text).rstrip(".")
    for mark in ("\\", "*", "_", "<", "[", "]", "$", "{", "}", "#"):
        plain = plain.replace(mark, f"\\{mark}")
    return plain
