"""Data parallelism and equal chains."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest

from graphpipe.planner.baselines.plain import data_parallel, equal_parts, gpipe, one_f_one_b
from graphpipe.planner.baselines.recipe import machines_of
from tests.planner.synthetic import cluster_of, towers, units_of


@pytest.mark.parametrize("seed", range(30))
def test_the_largest_piece_is_as_small_as_any_cut_makes_it(seed: int) -> None:
    random = Random(seed)
    count = random.randint(1, 9)
    parts = random.randint(1, count)
    work = [random.choice([0.0, 1.0, 2.0, 5.0, random.random()]) for _ in range(count)]
    best = min(
        max(sum(work[a:b]) for a, b in zip((0, *cuts), (*cuts, count), strict=True))
        for cuts in combinations(range(1, count), parts - 1)
    )
    found = equal_parts(range(count), work, parts)
    assert [u for piece in found for u in piece] == list(range(count))
    assert len(found) == parts
    assert all(found)
    assert max(sum(work[u] for u in piece) for piece in found) <= best * (1 + 1e-6) + 1e-9


def test_data_parallelism_uses_all_devices_down_to_one_sample_each() -> None:
    units = units_of(towers(2, 2, 1))
    recipes = list(data_parallel(units, machines_of(units, cluster_of(4)), 16))
    assert [recipe.stages[0].micro_batch for recipe in recipes] == [4, 2, 1]
    assert all(recipe.stages[0].replicas == 4 for recipe in recipes)
    few = list(data_parallel(units, machines_of(units, cluster_of(4)), 3))
    assert [(r.stages[0].replicas, r.stages[0].micro_batch) for r in few] == [(3, 1)]


def test_equal_chains_have_a_stage_for_each_device() -> None:
    units = units_of(towers(2, 3, 2))
    machines = machines_of(units, cluster_of(4))
    for recipe in one_f_one_b(units, machines, 8):
        assert [len(stage.units) for stage in recipe.stages] == [2, 2, 2, 2]
        assert recipe.builder == "kfkb"
        assert recipe.chain
    assert {recipe.builder for recipe in gpipe(units, machines, 8)} == {"gpipe"}
    assert all(s.recompute for recipe in gpipe(units, machines, 8) for s in recipe.stages)
    short = next(one_f_one_b(units, machines_of(units, cluster_of(32)), 8))
    assert len(short.stages) == len(units)
