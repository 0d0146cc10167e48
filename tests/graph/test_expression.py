"""Sizes that depend on the batch."""

from __future__ import annotations

import pytest

from graphpipe.errors import GraphError
from graphpipe.graph.expression import evaluate


@pytest.mark.parametrize(
    ("text", "value"),
    [(7, 7), ("b", 5), ("8*b", 40), ("b*b - b", 20), ("(b + 1)//2", 3), ("-b % 3", 1),
     ("max(4, b, 2)", 5), ("min(4, b)", 4)],
)  # fmt: skip
def test_values(text: int | str, value: int) -> None:
    assert evaluate(text, 5) == value


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "b.real", "b**99", "x", "b if b else 1", "True", "1.5", "b,", "min()",
     "max(b, key=b)", "", "(" * 300 + "b" + ")" * 300, "b+" * 5000 + "b", "[b][0]", "b<3"],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(GraphError, match="is not a size"):
        evaluate(text, 2)


def test_division_by_zero_is_told() -> None:
    with pytest.raises(GraphError, match="divides by zero at b = 2"):
        evaluate("4//(b - 2)", 2)
