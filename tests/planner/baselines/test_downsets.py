"""Down-sets: enumeration, subsets, sums."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from graphpipe.planner.baselines.downsets import DownSetLimitError, enumerate_down_sets
from tests.planner.baselines.random_dags import all_down_sets, random_edges


@pytest.mark.parametrize("seed", range(20))
def test_all_down_sets_are_found_once_by_size(seed: int) -> None:
    random = Random(seed)
    nodes = random.randint(1, 8)
    edges = random_edges(random, nodes, random.random())
    sets = enumerate_down_sets(nodes, edges)
    found = [frozenset(np.flatnonzero(row)) for row in sets.members]
    assert set(found) == set(all_down_sets(nodes, edges))
    assert len(found) == len(set(found))
    assert [len(item) for item in found] == sorted(len(item) for item in found)
    for index, members in enumerate(found):
        below = [i for i, other in enumerate(found) if other < members]
        assert sets.below(index).tolist() == below


def test_more_than_64_nodes_use_several_words() -> None:
    nodes = 70
    sets = enumerate_down_sets(nodes, [(i, i + 1) for i in range(nodes - 1)])
    assert len(sets) == nodes + 1
    assert sets.words.shape == (nodes + 1, 2)
    assert sets.below(nodes).tolist() == list(range(nodes))
    assert sets.nodes_between(60, 66) == (60, 61, 62, 63, 64, 65)


def test_sums_are_over_members() -> None:
    sets = enumerate_down_sets(3, [(0, 1), (0, 2)])
    assert sets.sums([1.0, 10.0, 100.0]).tolist() == [0.0, 1.0, 11.0, 101.0, 111.0]


def test_too_many_are_refused_with_the_limit() -> None:
    with pytest.raises(DownSetLimitError, match=r"at most 1000.*[Cc]oarsen"):
        enumerate_down_sets(30, [], limit=1000)
