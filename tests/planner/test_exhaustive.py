"""The search against every plan of small random graphs, with the same schedules."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from graphpipe.planner.evaluate import score
from graphpipe.planner.explore import Search
from graphpipe.planner.layout import Layout
from graphpipe.planner.seeds import Freedom, micro_batch_sizes
from graphpipe.planner.space import Space
from tests.planner.synthetic import cluster_of, random_graph, units_of


def best_of_all(space: Space, devices: int, batch: int) -> int:
    """The shortest schedule over all assignments, sizes, slacks and replica counts 1 and 2."""
    best: int | None = None
    count = len(space.units)
    for parts in range(1, devices + 1):
        for replicas in product((1, 2), repeat=parts):
            if sum(replicas) > devices:
                continue
            for assign in product(range(parts), repeat=count):
                if set(assign) != set(range(parts)):
                    continue
                for size in micro_batch_sizes(batch):
                    for slack in (0, 1):
                        found = score(space, Layout(1, replicas, assign, size, slack=slack))
                        if found is not None and (best is None or found.iteration_ns < best):
                            best = found.iteration_ns
    assert best is not None
    return best


def ratios(seeds: range, most_ops: int, devices: int, batch: int) -> list[float]:
    out = []
    for seed in seeds:
        random = Random(seed)
        file = random_graph(random, random.randint(2, most_ops))
        units = units_of(file)
        cluster = cluster_of(devices, bandwidth=1e9)
        space = Space(units, cluster, batch, (2.0**40,) * devices, (0,) * len(units))
        found = Search(space, Freedom(copies=(1,), replicas=(1, 2))).run()
        assert found is not None
        best = best_of_all(space, devices, batch)
        out.append(found.score.iteration_ns / best if best else 1.0)
    return out


def test_the_search_is_close_to_the_optimum() -> None:
    found = ratios(range(12), most_ops=4, devices=2, batch=4)
    assert sum(found) / len(found) <= 1.02
    assert max(found) <= 1.15


@pytest.mark.campaign
@pytest.mark.timeout(1500)
def test_the_search_is_close_to_the_optimum_on_many() -> None:
    found = ratios(range(100, 220), most_ops=5, devices=3, batch=4)
    print(f"\nmean {sum(found) / len(found):.4f}, worst {max(found):.4f} of {len(found)}")
    assert sum(found) / len(found) <= 1.02
