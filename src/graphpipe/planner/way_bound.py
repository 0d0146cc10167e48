"""The price of a sample's way: part of the lower bound on the iteration time.

Large micro-batches save work, because they read the weights less often; but the first sample
has to wait for the whole micro-batch of every unit on its way, down and up. No choice of sizes
has both. Notation as in :mod:`graphpipe.planner.lower_bound`; ``docs/lower-bound.md`` proves:

Every unit u has one micro-batch size b_u in a plan, and sample 0 of the largest copy lies in a
full micro-batch of each. For a chain P of units from a source down, and the part of it up which
gradients return, T >= the sum of f_u(b_u) over P and of w_u(b_u) over that part. Work takes
capacity T >= sum of B (f_u(b_u) + w_u(b_u)) / b_u + optimizer. The first inequality m times and
the second once, added, hold for the sizes of the plan, and so for the least over all sizes,
unit by unit:

    T >= (optimizer + sum over u of min over b of [B t_u(b) / b + m (what P holds of t_u(b))])
         / (capacity + m)    for every m >= 0.

m = 0 is the work, a very large m the way alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_PRICES = np.geomspace(1e-3, 1e4, 71)
"""Values of m that are tried; every one gives a bound, more of them a slightly better one."""


class UnitTimes(NamedTuple):
    """Times of the units at the sizes of a cost table.

    Attributes:
        sizes: Micro-batch sizes, ascending, samples; between two of them times are linear.
        forward: [sizes, units] seconds, the least over the kinds of devices; inf: cannot run.
        backward: The same; 0 for units without a backward.
        capacity: Devices, the slower ones counted by their best ratio to the fastest at any
            unit and size.
    """

    sizes: FloatArray
    forward: FloatArray
    backward: FloatArray
    capacity: float


def way_bound(
    times: UnitTimes,
    batch_size: int,
    optimizer: float,
    predecessors: Sequence[Sequence[int]],
    gradient_to: Sequence[Sequence[int]],
) -> float:
    """The bound, seconds: the best over the prices m.

    Args:
        times: Of the units, in a topological order.
        batch_size: B, samples.
        optimizer: Seconds of all optimizer steps together, on the fastest kind.
        predecessors: Of each unit.
        gradient_to: Of each unit, the predecessors to which its backward returns a gradient.
    """
    nothing = np.zeros_like(times.forward)
    work = _least(times, batch_size, nothing)
    alone = [
        _finite(table.min(axis=0)) for table in (times.forward, times.forward + times.backward)
    ]
    best = max(
        (work.sum() + optimizer) / times.capacity,
        _dearest_way(alone[0], alone[1], predecessors, gradient_to),
    )
    for price in _PRICES:
        down = _least(times, batch_size, price * times.forward) - work
        both = _least(times, batch_size, price * (times.forward + times.backward)) - work
        gain = _dearest_way(down, both, predecessors, gradient_to)
        best = max(best, (work.sum() + gain + optimizer) / (times.capacity + price))
    return float(best)


def _least(times: UnitTimes, batch_size: int, extra: FloatArray) -> FloatArray:
    """[units]: the least over b of B t(b) / b + the value of ``extra`` ([sizes, units]) at b.

    Both are linear between sizes, so the sum is B p / b + q b + a constant there, with its least
    value at sqrt(B p / q) or at an end.
    """
    total, sizes = times.forward + times.backward, times.sizes[:, None]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        values = batch_size * total / sizes + extra
        least = np.where(np.isfinite(values), values, np.inf).min(axis=0)
        if len(sizes) > 1:
            low, high = sizes[:-1], sizes[1:]
            slope = np.diff(total, axis=0) / (high - low)
            fixed = total[:-1] - slope * low
            growth = np.diff(extra, axis=0) / (high - low)
            place = np.clip(np.sqrt(batch_size * fixed / growth), low, high)
            inside = batch_size * (fixed / place + slope) + extra[:-1] + growth * (place - low)
            inside = np.where(np.isfinite(inside), inside, np.inf)
            least = np.minimum(least, inside.min(axis=0))
    return _finite(least)


def _finite(values: FloatArray) -> FloatArray:
    """Units that can run nowhere count nothing."""
    return np.asarray(np.where(np.isfinite(values), values, 0.0))


def _dearest_way(
    down: FloatArray,
    both: FloatArray,
    predecessors: Sequence[Sequence[int]],
    gradient_to: Sequence[Sequence[int]],
) -> float:
    """The largest gain of a chain: forwards only (``down``), then, as far up as gradients
    return, units with both directions (``both``)."""
    downs = np.zeros(len(down))
    boths = np.zeros(len(down))
    for u, above in enumerate(predecessors):
        before = max((downs[v] for v in above), default=0.0)
        returned = max((boths[v] for v in gradient_to[u]), default=0.0)
        downs[u] = before + down[u]
        boths[u] = max(before, returned) + both[u]
    return float(boths.max(initial=0.0))
