"""Integer functions of the batch from a few values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpipe.graph.expression import evaluate
from graphpipe.graph.fit import SAMPLE_SIZES, fitted


@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(-1000, 1000))
def test_polynomials_of_degree_two_are_found_exactly(a: int, b: int, c: int) -> None:
    expression, exact = fitted({n: a * n * n + b * n + c for n in SAMPLE_SIZES})
    assert exact
    for n in (1, 2, 4, 64, 1000):
        assert evaluate(expression, n) == a * n * n + b * n + c


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda n: 7, 7),
        (lambda n: n, "b"),
        (lambda n: 12 * n, "12*b"),
        (lambda n: 3 * n + 4, "3*b + 4"),
        (lambda n: n * n, "b*b"),
        (lambda n: 2 * n * n - n, "2*b*b - b"),
        (lambda n: n * (n - 1) // 2, "(b*b - b)//2"),
    ],
)
def test_the_text_is_short(function: object, text: object) -> None:
    assert fitted({n: function(n) for n in SAMPLE_SIZES}) == (text, True)  # type: ignore[operator]


def test_what_is_no_polynomial_gets_a_line_and_says_so() -> None:
    expression, exact = fitted({n: 2**n for n in SAMPLE_SIZES})
    assert not exact
    assert evaluate(expression, 7) == 2**7
    assert evaluate(expression, 1) >= 0
