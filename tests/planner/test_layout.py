"""Whatever units are assigned to whatever parts, stages are connected, convex and acyclic."""

from __future__ import annotations

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.planner.layout import Layout, merged_pieces, pieces


@st.composite
def assignments(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int]]:
    count = draw(st.integers(1, 14))
    preds = [
        sorted(draw(st.sets(st.integers(0, node - 1), max_size=3))) if node else []
        for node in range(count)
    ]
    assign = [draw(st.integers(0, 3)) for _ in range(count)]
    fixed = [draw(st.sampled_from([0, 0, 0, 8])) for _ in range(count)]
    return preds, assign, fixed


def quotient(preds: list[list[int]], stages: list[list[int]]) -> nx.DiGraph:
    owner = {u: s for s, units in enumerate(stages) for u in units}
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(stages)))
    for u, sources in enumerate(preds):
        graph.add_edges_from((owner[v], owner[u]) for v in sources if owner[v] != owner[u])
    return graph


@given(assignments())
@settings(max_examples=300, deadline=None)
def test_pieces_are_acyclic_and_of_one_kind(
    case: tuple[list[list[int]], list[int], list[int]],
) -> None:
    preds, assign, fixed = case
    stages = pieces(preds, assign, fixed)
    assert sorted(u for units in stages for u in units) == list(range(len(preds)))
    graph = quotient(preds, stages)
    assert nx.is_directed_acyclic_graph(graph)
    assert all(a < b for a, b in graph.edges)
    for units in stages:
        assert units == sorted(units)
        assert len({(assign[u], fixed[u]) for u in units}) == 1


@given(assignments())
@settings(max_examples=100, deadline=None)
def test_merged_pieces_are_one_stage_a_part_or_nothing(
    case: tuple[list[list[int]], list[int], list[int]],
) -> None:
    preds, assign, fixed = case
    stages = merged_pieces(preds, assign, fixed)
    groups = sorted({(assign[u], fixed[u]) for u in range(len(preds))})
    if stages is None:
        blocks = [[u for u in range(len(preds)) if (assign[u], fixed[u]) == g] for g in groups]
        assert not nx.is_directed_acyclic_graph(quotient(preds, blocks))
    else:
        assert len(stages) == len(groups)
        assert all(a < b for a, b in quotient(preds, stages).edges)


def test_tail_and_head_on_one_device_are_two_stages() -> None:
    # Two branches of two units, then a join; part 1 has the end of one and the start of the other.
    preds = [[], [0], [], [2], [1, 3]]
    assert pieces(preds, [0, 1, 1, 2, 3], [0] * 5) == [[0], [2], [1], [3], [4]]


def test_tables_with_the_same_reader_are_one_stage() -> None:
    preds = [[], [], [], [0, 1, 2]]
    assert pieces(preds, [0, 0, 1, 2], [0] * 4) == [[0, 1], [2], [3]]


def test_a_join_is_apart_from_the_branch_that_it_ends() -> None:
    # Branches 0-1 and 2-3, join 4; the join shares a device with the second branch's end.
    preds = [[], [0], [], [2], [1, 3]]
    assert pieces(preds, [0, 1, 2, 3, 3], [0] * 5) == [[0], [2], [1], [3], [4]]


def test_a_branch_is_apart_from_the_fork_before_it() -> None:
    # Unit 0 feeds 1 (same device) and 2 (another one): 2 must not wait for 1's forward.
    assert pieces([[], [0], [0], [1, 2]], [0, 0, 1, 2], [0] * 4) == [[0], [1], [2], [3]]


def test_a_skip_does_not_split_a_stage() -> None:
    # 0 -> 1 -> 2 -> 3 with 0 -> 3: everything after 0 waits for it anyway.
    assert pieces([[], [0], [1], [0, 2]], [0, 1, 1, 1], [0] * 4) == [[0], [1, 2, 3]]


def test_a_path_through_another_part_splits_a_stage() -> None:
    # 0 -> 1 -> 2 and 0 -> 2, with 1 elsewhere: 0 and 2 cannot be one stage.
    assert pieces([[], [0], [0, 1]], [0, 1, 0], [0] * 3) == [[0], [1], [2]]


def test_sizes_by_part() -> None:
    layout = Layout(1, (1, 2), (0, 1), 8, part_batch=(4, 16))
    assert (layout.devices, layout.batch_of(0), layout.batch_of(1)) == (3, 4, 16)
    assert not layout.recomputes(1)
