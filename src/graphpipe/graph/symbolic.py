"""Sizes of an export (sympy, in the batch symbol) as expressions and as nodes.

Both walk the same few kinds of sympy expression. Anything else (a size that depends on
data, a square root) has no place in a graph whose stages choose their micro-batch size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch import fx
from torch.utils._sympy import functions as torch_sympy

from graphpipe.errors import CaptureError
from graphpipe.graph.expression import Expression


def expression_of(expression: sympy.Expr, batch: sympy.Symbol) -> Expression:
    """The size as text in ``b``.

    Raises:
        CaptureError: if it depends on anything but the batch.
    """
    built = _walk(expression, batch, "b", lambda symbol, _function, x, y: _text(symbol, x, y))
    return built if isinstance(built, int) else str(built)


def node_of(
    expression: sympy.Expr, batch: sympy.Symbol, graph: fx.Graph, batch_node: fx.Node
) -> fx.Node | int:
    """The size as arithmetic on the node of the micro-batch size.

    Raises:
        CaptureError: if it depends on anything but the batch.
    """
    built = _walk(
        expression,
        batch,
        batch_node,
        lambda _symbol, function, x, y: graph.call_function(function, (x, y)),
    )
    assert isinstance(built, (int, fx.Node))
    return built


_Combine = Callable[[str, Callable[..., Any], Any, Any], Any]


def _text(symbol: str, left: object, right: object) -> str:
    if symbol in ("min", "max"):
        return f"{symbol}({left}, {right})"
    return f"{_term(left)}{symbol}{_term(right)}"


def _term(value: object) -> str:
    text = str(value)
    simple = text.isalnum() or (text.startswith(("min(", "max(")) and text.endswith(")"))
    return text if simple else f"({text})"


def _walk(expression: sympy.Expr, batch: sympy.Symbol, b: Any, combine: _Combine) -> Any:
    def fold(symbol: str, function: Callable[..., Any], items: tuple[sympy.Expr, ...]) -> Any:
        result = walk(items[0])
        for item in items[1:]:
            result = combine(symbol, function, result, walk(item))
        return result

    def walk(item: sympy.Expr) -> Any:
        if item.is_Integer:
            return int(item)
        if item == batch:
            return b
        if item.is_Add:
            return fold("+", operator.add, item.args)
        if item.is_Mul:
            return fold("*", operator.mul, item.args)
        if item.is_Pow and item.exp.is_Integer and 0 < int(item.exp) <= 4:
            return fold("*", operator.mul, (item.base,) * int(item.exp))
        if isinstance(item, (torch_sympy.FloorDiv, torch_sympy.CleanDiv)):
            return fold("//", operator.floordiv, item.args)
        if isinstance(item, (torch_sympy.Mod, torch_sympy.PythonMod, sympy.Mod)):
            return fold("%", operator.mod, item.args)
        if isinstance(item, (torch_sympy.Max, sympy.Max)):
            return fold("max", max, item.args)
        if isinstance(item, (torch_sympy.Min, sympy.Min)):
            return fold("min", min, item.args)
        raise CaptureError(
            "A size depends on the data, not only on the number of samples",
            got=str(item),
            fix="Keep shapes independent of values (masks instead of boolean indexing), or mark "
            "the module as opaque",
        )

    return walk(expression)
