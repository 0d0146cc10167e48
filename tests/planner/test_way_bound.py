"""The price of a sample's way: closed forms, and the least over all sizes by trying them."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest

from graphpipe.planner.way_bound import UnitTimes, way_bound


def _times(
    sizes: list[int], forward: list[list[float]], backward: list[list[float]], devices: float
) -> UnitTimes:
    """From times by unit and then by size."""
    return UnitTimes(
        np.array(sizes, dtype=float), np.array(forward).T, np.array(backward).T, devices
    )


def test_with_work_in_proportion_to_samples_the_work_counts() -> None:
    """Two units of 1 and 2 seconds a sample, 8 samples, 2 devices."""
    times = _times([1, 8], [[1, 8], [2, 16]], [[0, 0], [0, 0]], 2.0)
    assert way_bound(times, 8, 0.0, [[], [0]], [[], []]) == pytest.approx(12.0, rel=0.01)
    assert way_bound(times, 8, 4.0, [[], [0]], [[], []]) == pytest.approx(14.0, rel=0.01)


def test_with_many_devices_the_way_counts() -> None:
    """A forward takes 1 s at any size, a backward 2 s: three units in a row take 9 s."""
    times = _times([1, 8], [[1, 1]] * 3, [[2, 2]] * 3, 1000.0)
    chain = [[], [0], [1]]
    assert way_bound(times, 8, 0.0, chain, chain) == pytest.approx(9.0, rel=0.02)
    # Without a gradient to the first, only its forward is on the way.
    assert way_bound(times, 8, 0.0, chain, [[], [], [1]]) == pytest.approx(7.0, rel=0.02)
    # Units beside one another are not on one way.
    assert way_bound(times, 8, 0.0, [[], [], []], [[], [], []]) == pytest.approx(3.0, rel=0.02)


def test_work_and_way_pull_at_the_size() -> None:
    """One unit, t(b) = 1 + b, 64 samples, one device: b = 64 needs 65 s, b = 8 takes 72 s."""
    sizes = [1, 2, 4, 8, 16, 32, 64]
    times = _times(sizes, [[1.0 + b for b in sizes]], [[0.0] * len(sizes)], 1.0)
    assert way_bound(times, 64, 0.0, [[]], [[]]) == pytest.approx(65.0, rel=0.01)
    # On eight devices: work alone 65 / 8; with a way of 1 + b and 64 (1 + b) / b / 8 no b
    # is below 10.2, at b = 6; the bound lies between.
    eight = way_bound(times._replace(capacity=8.0), 64, 0.0, [[]], [[]])
    best = min(max(1.0 + b, 64 * (1 + b) / b / 8) for b in range(1, 65))
    assert 65 / 8 * 1.1 < eight <= best


@pytest.mark.parametrize("seed", range(60))
def test_it_holds_for_every_choice_of_sizes(seed: int) -> None:
    """For each b of each unit, T is the larger of the work on all devices and of every way."""
    random = Random(seed)
    units, batch, devices = random.randint(1, 3), random.choice([3, 6, 8]), random.randint(1, 6)
    sizes = sorted(random.sample(range(1, batch + 1), min(batch, random.randint(1, 4))))
    grown = [
        [[a + c * b ** random.choice([0.5, 1.0, 1.0, 1.3]) for b in sizes] for _ in range(units)]
        for a, c in ((random.random() * 3, random.random()), (random.random(), random.random()))
    ]
    times = _times(sizes, grown[0], grown[1], float(devices))
    above = [[v for v in range(u) if random.random() < 0.6] for u in range(units)]
    back = [[v for v in items if random.random() < 0.8] for items in above]
    optimizer = random.choice([0.0, 1.0])
    bound = way_bound(times, batch, optimizer, above, back)

    def at(table: list[list[float]], u: int, b: int) -> float:
        if b >= sizes[-1]:
            return table[u][-1] * b / sizes[-1]
        return float(np.interp(b, sizes, table[u]))

    def longest(b: tuple[int, ...]) -> float:
        downs, boths = [0.0] * units, [0.0] * units
        for u in range(units):
            before = max((downs[v] for v in above[u]), default=0.0)
            own = at(grown[0], u, b[u]), at(grown[1], u, b[u])
            downs[u] = before + own[0]
            boths[u] = max(before, max((boths[v] for v in back[u]), default=0.0)) + sum(own)
        return max(boths)

    for b in product(range(1, batch + 1), repeat=units):
        work = sum(
            (at(grown[0], u, b[u]) + at(grown[1], u, b[u])) * batch / b[u] for u in range(units)
        )
        assert bound <= max((work + optimizer) / devices, longest(b)) * (1 + 1e-9)


def test_a_unit_that_runs_nowhere_counts_nothing() -> None:
    inf = float("inf")
    times = _times([1, 2], [[inf, inf], [1.0, 2.0]], [[0.0, 0.0], [0.0, 0.0]], 1.0)
    assert way_bound(times, 2, 0.0, [[], [0]], [[], []]) == pytest.approx(2.0, rel=0.01)
