"""Sizes as polynomials of the micro-batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpipe.cost.sizes import (
    Size,
    fit,
    linear_pair,
    message_sizes,
    output_size,
    storage_table,
    through,
    transient_bytes,
    values,
)
from tests.cost.graphs import mlp

SMALL = st.integers(0, 1000)


@given(SMALL, SMALL, SMALL, st.integers(1, 5000))
def test_polynomials_of_degree_two_are_exact(a: int, b: int, c: int, batch: int) -> None:
    size = fit(f"{a} + {b}*b + {c}*b*b")
    assert size.at(batch) == pytest.approx(a + b * batch + c * batch * batch)


@given(SMALL, SMALL, SMALL, st.lists(st.integers(1, 300), min_size=3, max_size=6, unique=True))
def test_measured_points_give_the_polynomial_back(a: int, b: int, c: int, at: list[int]) -> None:
    found = through({x: a + b * x + c * x * x for x in at})
    for x in (1, 7, 1000):
        assert found.at(x) == pytest.approx(a + b * x + c * x * x, rel=1e-3, abs=1.0)


def test_one_and_two_points() -> None:
    assert through({4: 20}) == Size(0.0, 5.0)
    assert through({4: 20, 6: 26}) == Size(8.0, 3.0)
    # Rounding must not leave a square behind.
    assert through({1: 10, 2: 20, 4: 40, 8: 80}) == Size(0.0, 10.0, 0.0)


def test_other_expressions_are_matched_where_they_are_fitted() -> None:
    size = fit("4*(b//3) + 10")
    for batch in (16, 32, 64):
        assert size.at(batch) == pytest.approx(4 * (batch // 3) + 10)
    assert fit(7) == Size(7.0)


def test_the_secant_is_exact_at_both_ends_and_never_below() -> None:
    size = Size(3.0, 2.0, 5.0)
    fixed, per_sample = linear_pair(size, (2, 4, 64))
    for batch in range(2, 65):
        assert fixed + per_sample * batch >= size.at(batch) - 1e-9
    assert fixed + per_sample * 2 == pytest.approx(size.at(2))
    assert fixed + per_sample * 64 == pytest.approx(size.at(64))
    assert linear_pair(Size(3.0, 2.0), (1,)) == (3.0, 2.0)


def test_storages_are_numbered_once_and_the_larger_statement_holds() -> None:
    table = storage_table([{"a": Size(1.0)}, {}, {"b": Size(0.0, 2.0), "a": Size(4.0)}])
    assert table.saved == ((0,), (), (1, 0))
    assert table.storages.tolist() == [[4.0, 0.0], [0.0, 2.0]]
    assert table.squares.size == 0
    assert storage_table([{"c": Size(0.0, 0.0, 3.0)}]).squares.tolist() == [3.0]


def test_values() -> None:
    assert values(["b*b", 3, "b*b"], (1, 5)).tolist() == [[1.0, 25.0], [3.0, 3.0], [1.0, 25.0]]


def test_sizes_of_a_graph() -> None:
    graph = mlp()
    outputs = [output_size(op) for op in graph.ops]
    assert outputs[0] == Size(0.0, 32.0)
    assert outputs[-1] == Size(4.0)
    output, gradient = message_sizes(graph, outputs, (1, 8))
    assert gradient[0].tolist() == [0.0, 0.0]  # frozen
    assert gradient[1].tolist() == output[1].tolist() == [0.0, 32.0]
    transient = transient_bytes(graph, outputs)
    row = graph.op_index
    assert transient[row["frozen"]] == Size()
    assert transient[row["add"]] == Size(0.0, 64.0)  # of its output and of its trained input
    assert transient[row["second"]] == Size(0.0, 64.0)
