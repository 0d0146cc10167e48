"""The tree holds exactly the order of the graph, or a little more, and never less."""

from __future__ import annotations

import random

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.graph.series_parallel import (
    Leaf,
    Parallel,
    Series,
    Tree,
    decompose,
    is_exact,
    leaves,
)


def tree_order(tree: Tree) -> set[tuple[int, int]]:
    """All pairs that the tree puts in order."""
    pairs: set[tuple[int, int]] = set()
    if isinstance(tree, Series):
        sets = [leaves(child) for child in tree.children]
        for i, before in enumerate(sets):
            for after in sets[i + 1 :]:
                pairs |= {(a, b) for a in before for b in after}
    if not isinstance(tree, Leaf):
        for child in tree.children:
            pairs |= tree_order(child)
    return pairs


def closure(preds: list[list[int]]) -> set[tuple[int, int]]:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(preds)))
    graph.add_edges_from((a, b) for b, sources in enumerate(preds) for a in sources)
    return set(nx.transitive_closure_dag(graph).edges)


@st.composite
def dags(draw: st.DrawFn) -> list[list[int]]:
    count = draw(st.integers(1, 12))
    return [
        sorted(draw(st.sets(st.integers(0, node - 1), max_size=3))) if node else []
        for node in range(count)
    ]


@given(dags())
@settings(max_examples=150, deadline=None)
def test_the_tree_never_misses_a_precedence(preds: list[list[int]]) -> None:
    tree = decompose(preds)
    assert sorted(leaves(tree)) == list(range(len(preds)))
    order, wanted = tree_order(tree), closure(preds)
    assert wanted <= order
    if is_exact(tree):
        assert wanted == order


@given(st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_series_parallel_orders_come_back_exact(seed: int) -> None:
    """Random series-parallel graphs, with redundant edges added, are recognised."""
    rng = random.Random(seed)
    nodes = 0
    edges: list[tuple[int, int]] = []

    def build(size: int) -> tuple[list[int], list[int]]:
        nonlocal nodes
        if size == 1:
            nodes += 1
            return [nodes - 1], [nodes - 1]
        left = rng.randint(1, size - 1)
        first, second = build(left), build(size - left)
        if rng.random() < 0.5:
            edges.extend((a, b) for a in first[1] for b in second[0])
            return first[0], second[1]
        return first[0] + second[0], first[1] + second[1]

    build(rng.randint(1, 12))
    wanted = closure([sorted(a for a, b in edges if b == node) for node in range(nodes)])
    extra = [pair for pair in sorted(wanted) if rng.random() < 0.3]
    preds = [sorted({a for a, b in edges + extra if b == node}) for node in range(nodes)]
    tree = decompose(preds)
    assert is_exact(tree)
    assert tree_order(tree) == wanted


def test_two_branches_and_a_join() -> None:
    tree = decompose([[], [0], [], [2], [1, 3]])
    assert tree == Series(
        (
            Parallel((Series((Leaf(0), Leaf(1))), Series((Leaf(2), Leaf(3))))),
            Leaf(4),
        )
    )


def test_skips_fall_away() -> None:
    u_net = [[], [0], [1], [2, 1], [3, 0]]
    assert decompose(u_net) == Series(tuple(Leaf(i) for i in range(5)))


def test_many_readers_of_an_encoder_fall_away() -> None:
    # 0-1 is the encoder; each decoder layer 3..6 reads its end.
    preds = [[], [0], [], [2, 1], [3, 1], [4, 1], [5, 1]]
    tree = decompose(preds)
    assert is_exact(tree)
    assert isinstance(tree, Series)
    assert [type(child) for child in tree.children] == [Parallel, Leaf, Leaf, Leaf, Leaf]


def test_an_n_is_serialised_where_it_costs_least() -> None:
    # a=0, b=1, c=2, d=3 with a<c, b<c, b<d; putting {a,b} before {c,d} adds only a<d.
    tree = decompose([[], [], [0, 1], [1]])
    assert not is_exact(tree)
    assert tree_order(tree) == {(0, 2), (0, 3), (1, 2), (1, 3)}


def test_disconnected_graph_is_parallel() -> None:
    tree = decompose([[], [0], [], [2]])
    assert isinstance(tree, Parallel)
    assert len(tree.children) == 2


@pytest.mark.parametrize("rungs", [True, False])
def test_long_graphs_need_no_recursion(rungs: bool) -> None:
    count = 3000
    preds = [[i - 1] if i else [] for i in range(count)]
    if rungs:
        preds = [[i - 2] if i >= 2 else [] for i in range(400)]
        for i in range(1, 400, 2):
            preds[i] = [*preds[i], i - 1]
    tree = decompose(preds)
    assert len(leaves(tree)) == len(preds)
    assert is_exact(tree) is not rungs
