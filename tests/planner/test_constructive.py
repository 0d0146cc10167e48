"""Orders are topological; cuts are optimal for their order and leave no part out."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.graph.series_parallel import decompose
from graphpipe.planner.constructive import cut, orders


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[list[int]], list[float]]:
    count = draw(st.integers(1, 12))
    preds = [
        sorted(draw(st.sets(st.integers(0, node - 1), max_size=3))) if node else []
        for node in range(count)
    ]
    return preds, [float(draw(st.integers(0, 9))) for _ in range(count)]


@given(graphs())
@settings(max_examples=100, deadline=None)
def test_orders_are_topological(case: tuple[list[list[int]], list[float]]) -> None:
    preds, work = case
    for order in orders(decompose(preds, work), work, preds):
        place = {u: p for p, u in enumerate(order)}
        assert sorted(order) == list(range(len(preds)))
        assert all(place[s] < place[u] for u, sources in enumerate(preds) for s in sources)


def test_branches_come_one_after_the_other() -> None:
    preds = [[], [], [0], [1], [2, 3]]  # two branches, interleaved numbers
    found = orders(decompose(preds), [1.0] * 5, preds)
    assert found[0] == (0, 2, 1, 3, 4)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=10), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_a_cut_has_the_smallest_bottleneck(work: list[int], devices: int) -> None:
    times = [float(w) for w in work]
    order = list(range(len(work)))
    found = cut(order, {1: times}, [1.0] * devices)
    assert found is not None
    parts = max(found.assign) + 1
    assert parts <= devices
    loads = [sum(t for t, p in zip(times, found.assign, strict=True) if p == k)
             for k in range(parts)]  # fmt: skip
    best = min(
        max(sum(times[a:b]) for a, b in zip((0, *cuts), (*cuts, len(work)), strict=True))
        for cuts in combinations(range(len(work) + 1), min(devices, len(work)) - 1)
    )
    assert max(loads) <= best * 1.002 + 1e-6
    assert all(a <= b for a, b in zip(found.assign, found.assign[1:], strict=False))


def test_a_giant_gets_several_devices() -> None:
    times = [1.0, 10.0, 1.0]
    half = [t / 2 for t in times]
    found = cut([0, 1, 2], {1: times, 2: half}, [1.0] * 4)
    assert found is not None
    assert found.replicas[found.assign[1]] == 2


def test_faster_devices_get_more() -> None:
    found = cut(list(range(9)), {1: [1.0] * 9}, [1.0, 2.0])
    assert found is not None
    assert found.assign.count(0) == 3


def test_bytes_limit_a_part() -> None:
    found = cut([0, 1, 2, 3], {1: [1.0, 1.0, 1.0, 9.0]}, [1.0] * 2, [2.0] * 2, [1.0] * 4)
    assert found is not None
    assert found.assign == (0, 0, 1, 1)
    assert cut([0, 1], {1: [1.0, 1.0]}, [1.0], [1.0], [1.0, 1.0]) is None
