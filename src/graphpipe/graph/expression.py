"""Sizes that depend on the batch: integer expressions in the one symbol ``b``.

A captured graph is valid for every micro-batch size, so dimensions, FLOPs and bytes are
either plain integers or short expressions such as ``"8*b"`` or ``"b*b"``. They are text,
so that they travel in JSON, and are evaluated by a whitelist, never by ``eval`` of
foreign code.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import lru_cache

from graphpipe.errors import GraphError

Expression = int | str
"""An integer, or an expression in ``b``: ``+ - * // %``, ``min``, ``max``, parentheses."""

_BINARY = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_MAX_LENGTH = 2000


def evaluate(expression: Expression, batch: int) -> int:
    """The value of ``expression`` for a micro-batch of ``batch`` samples.

    Raises:
        GraphError: if the text is not an expression of the allowed kind.
    """
    if isinstance(expression, int):
        return expression
    try:
        return _compiled(expression)(batch)
    except ZeroDivisionError:
        raise GraphError(f"The size {expression!r} divides by zero at b = {batch}") from None


@lru_cache(maxsize=65536)
def _compiled(text: str) -> Callable[[int], int]:
    if len(text) > _MAX_LENGTH:
        raise _bad(text[:40] + "...", "it is too long")
    try:
        tree = ast.parse(text, mode="eval")
        _check(tree.body, text)
        code = compile(tree, "<size>", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _bad(text, "it does not parse") from None
    names: dict[str, object] = {"__builtins__": {}, "min": min, "max": max}

    def run(batch: int) -> int:
        # Only names and operators that _check let through can occur in the code.
        value: int = eval(code, names, {"b": batch})
        return value

    return run


def _check(node: ast.expr, text: str) -> None:
    match node:
        case ast.Constant(value=int()) if not isinstance(node.value, bool):
            return
        case ast.Name(id="b"):
            return
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check(operand, text)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _BINARY):
            _check(left, text)
            _check(right, text)
        case ast.Call(func=ast.Name(id="min" | "max"), args=args, keywords=[]) if args:
            for arg in args:
                _check(arg, text)
        case _:
            raise _bad(text, f"'{ast.unparse(node)}' is not allowed")


def _bad(text: str, why: str) -> GraphError:
    return GraphError(
        f"{text!r} is not a size: {why}",
        expected="an integer, or an expression in b with + - * // % min max",
    )
