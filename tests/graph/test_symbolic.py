"""Sizes of an export as expressions in b and as arithmetic on the micro-batch size."""

from __future__ import annotations

import pytest
import sympy
from torch import fx
from torch.utils._sympy.functions import FloorDiv, Max, Min, PythonMod

from graphpipe.errors import CaptureError
from graphpipe.graph.expression import evaluate
from graphpipe.graph.symbolic import expression_of, node_of

S = sympy.Symbol("s7", positive=True, integer=True)
SIZES = [
    S,
    8 * S,
    S + 3,
    S * S,
    2 * S**3 - S,
    FloorDiv(S + 1, 2),
    PythonMod(S, 3),
    Max(4, S),
    Min(4, S),
    sympy.Integer(12),
    (S + 1) * (S + 2) * 5,
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_text_and_nodes_have_the_value_of_the_size(size: sympy.Expr) -> None:
    text = expression_of(size, S)
    graph = fx.Graph()
    batch = graph.placeholder("micro_batch_size")
    graph.output(node_of(size, S, graph, batch))
    module = fx.GraphModule({}, graph)
    for b in (1, 2, 5, 12):
        expected = int(size.subs(S, b))
        assert evaluate(text, b) == expected
        assert module(b) == expected


@pytest.mark.parametrize("size", [sympy.Symbol("u0"), sympy.sqrt(S)], ids=str)
def test_a_size_that_depends_on_data_is_refused(size: sympy.Expr) -> None:
    with pytest.raises(CaptureError, match="depends on the data"):
        expression_of(size, S)
