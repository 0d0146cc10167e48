"""Units are convex, acyclic, whole where a rule asks for it, and no heavier than the grain."""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.graph.coarsen import coarsen, forced_groups
from graphpipe.graph.model_graph import ModelGraph, Op


def graph_of(preds: Sequence[Sequence[int]], **marks: dict[int, object]) -> ModelGraph:
    """Ops op0, op1, ... ; ``marks`` give fields of single ops, such as ``group={2: 1}``."""
    ops = []
    for i, sources in enumerate(preds):
        extra = {field: values[i] for field, values in marks.items() if i in values}
        ops.append(
            Op(
                name=f"op{i}",
                target="aten.x",
                key=f"op{i}",
                inputs=tuple(f"op{s}" for s in sources),
                **extra,
            )
        )
    return ModelGraph(name="test", ops=tuple(ops))


def check(graph: ModelGraph, units: Sequence[Sequence[int]]) -> None:
    owner = {op: u for u, ops in enumerate(units) for op in ops}
    assert sorted(owner) == [i for i, op in enumerate(graph.ops) if not op.prep]
    quotient = nx.DiGraph()
    quotient.add_nodes_from(range(len(units)))
    for op, u in owner.items():
        for source in graph.predecessors[op]:
            if source in owner and owner[source] != u:
                quotient.add_edge(owner[source], u)
    assert nx.is_directed_acyclic_graph(quotient)
    assert all(a < b for a, b in quotient.edges), "units are not in a topological order"


@st.composite
def inputs(draw: st.DrawFn) -> tuple[list[list[int]], list[float], float]:
    count = draw(st.integers(1, 14))
    preds = [
        sorted(draw(st.sets(st.integers(0, node - 1), max_size=3))) if node else []
        for node in range(count)
    ]
    weights = [draw(st.sampled_from([0.0, 0.1, 1.0, 3.0])) for _ in range(count)]
    return preds, weights, draw(st.sampled_from([0.0, 0.5, 2.0, 100.0]))


@given(inputs(), st.sets(st.integers(0, 13), max_size=3), st.sets(st.integers(0, 13), max_size=2))
@settings(max_examples=150, deadline=None)
def test_units_are_convex_and_keep_groups(
    given_input: tuple[list[list[int]], list[float], float], group: set[int], stuck: set[int]
) -> None:
    preds, weights, grain = given_input
    count = len(preds)
    graph = graph_of(
        preds,
        group={i: 7 for i in group if i < count},
        crossable={i: False for i in stuck if i < count},
    )
    for units in (forced_groups(graph), coarsen(graph, weights, grain=grain)):
        check(graph, units)
        owner = {op: u for u, ops in enumerate(units) for op in ops}
        assert len({owner[i] for i in group if i < count}) <= 1
        for i in stuck:
            if i < count:
                assert {owner[s] for s in graph.successors[i]} <= {owner[i]}


@given(inputs())
@settings(max_examples=100, deadline=None)
def test_the_grain_is_respected(given_input: tuple[list[list[int]], list[float], float]) -> None:
    preds, weights, grain = given_input
    units = coarsen(graph_of(preds), weights, grain=grain)
    for ops in units:
        total, heaviest = sum(weights[i] for i in ops), max(weights[i] for i in ops)
        assert len(ops) == 1 or total <= max(grain, heaviest + 0.5 * grain) + 1e-9


def test_cheap_ops_join_their_producer() -> None:
    # linear, relu, linear, relu: two units.
    graph = graph_of([[], [0], [1], [2]])
    assert coarsen(graph, [10, 0.1, 10, 0.1], grain=1) == ((0, 1), (2, 3))


def test_a_cheap_concatenation_joins_its_reader() -> None:
    graph = graph_of([[], [], [0, 1], [2]])
    assert coarsen(graph, [10, 10, 0.1, 10], grain=1) == ((0,), (1,), (2, 3))


def test_small_twins_are_one_unit() -> None:
    # The query, key and value projections of an attention.
    graph = graph_of([[], [0], [0], [0], [1, 2, 3]])
    units = coarsen(graph, [10, 3, 3, 3, 10], grain=9)
    assert units == ((0,), (1, 2, 3), (4,))


def test_what_lies_between_members_of_a_group_joins_it() -> None:
    graph = graph_of([[], [0], [1]], group={0: 1, 2: 1})
    assert forced_groups(graph) == ((0, 1, 2),)


def test_prep_ops_belong_to_no_unit() -> None:
    graph = graph_of([[], [0], [0]], prep={0: True})
    assert forced_groups(graph) == ((1,), (2,))


def test_labels_keep_ops_apart() -> None:
    graph = graph_of([[], [0], [1]])
    assert coarsen(graph, [1, 1, 1], grain=10) == ((0, 1, 2),)
    assert coarsen(graph, [1, 1, 1], grain=10, apart={0: 0, 1: 1, 2: 1}) == ((0,), (1, 2))
