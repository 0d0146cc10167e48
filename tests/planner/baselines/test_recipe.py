"""The cluster as baselines see it, sizes, deadlines, order."""

from __future__ import annotations

import pytest

from graphpipe.planner.baselines.recipe import (
    Deadline,
    RecipeStage,
    SearchTimeoutError,
    in_topological_order,
    machines_of,
    micro_batch_sizes,
)
from tests.planner.synthetic import cluster_of, towers, units_of


def test_nodes_become_levels() -> None:
    units = units_of(towers(1, 1, 0))
    seen = machines_of(units, cluster_of(32, per_node=8, bandwidth=3e11, across=1e10))
    assert (seen.per_node, seen.nodes, seen.inner, seen.outer) == (8, 4, 3e11, 1e10)
    one = machines_of(units, cluster_of(8, bandwidth=3e11, across=1e10))
    assert (one.per_node, one.nodes, one.outer) == (8, 1, 3e11)
    ragged = machines_of(units, cluster_of(9, per_node=8, bandwidth=3e11, across=1e10))
    assert (ragged.per_node, ragged.nodes, ragged.inner) == (1, 9, 1e10)
    assert ragged.devices == 9


def test_sizes_are_powers_of_two_and_not_too_many() -> None:
    assert micro_batch_sizes(12) == (8, 4, 2, 1)
    assert micro_batch_sizes(12, at_most=3) == (2, 1)
    assert micro_batch_sizes(4096) == (4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4)


def test_a_deadline_stops_a_search_and_none_does_not() -> None:
    Deadline().check()
    Deadline(60).check()
    with pytest.raises(SearchTimeoutError, match="within 0 s"):
        Deadline(0).check()


def test_producers_come_first_even_where_numbers_say_otherwise() -> None:
    units = units_of(towers(2, 2, 1))
    stages = [RecipeStage((0, 1), 1, 1), RecipeStage((4,), 1, 1), RecipeStage((2, 3), 1, 1)]
    assert [s.units for s in in_topological_order(units, stages)] == [(0, 1), (2, 3), (4,)]


def test_a_search_that_will_not_end_is_given_up_early() -> None:
    Deadline().expect(1, 1_000_000)
    patient = Deadline(1000)
    assert sum(range(100_000))  # a moment passes
    patient.expect(1, 10)
    with pytest.raises(SearchTimeoutError, match=r"in all, judged after 1 of 1000000000000"):
        patient.expect(1, 10**12)
