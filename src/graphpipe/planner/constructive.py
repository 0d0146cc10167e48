"""The constructive start: cut one good order of the units into parts of equal work.

The order goes depth-first, branch after branch, the trunk last. Cut into d parts, each
part holds the tail of one branch and the head of the next as separate stages (see
:func:`~graphpipe.planner.layout.pieces`). Loads are balanced up to the largest unit, the
pipeline is only as deep as the branches are, and there is almost no bubble.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from graphpipe.graph.series_parallel import Leaf, Parallel, Tree


def orders(
    tree: Tree, work: Sequence[float], predecessors: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Topological orders to cut, without repeats, the most promising first.

    Branch after branch with the branches in the graph's order, with the heaviest first, with
    the lightest first; then level by level (the order that a chain needs to be shallow).
    """
    total = _totals(tree, work)
    out = [
        _depth_first(tree, total, 0),
        _depth_first(tree, total, -1),
        _depth_first(tree, total, 1),
        _by_level(work, predecessors),
    ]
    return list(dict.fromkeys(out))


def _totals(tree: Tree, work: Sequence[float]) -> dict[int, float]:
    """Work of every subtree, by its ``id``."""
    total: dict[int, float] = {}
    stack: list[tuple[Tree, bool]] = [(tree, False)]
    while stack:
        item, ready = stack.pop()
        if isinstance(item, Leaf):
            total[id(item)] = work[item.node]
        elif ready:
            total[id(item)] = sum(total[id(child)] for child in item.children)
        else:
            stack.append((item, True))
            stack.extend((child, False) for child in item.children)
    return total


def _depth_first(tree: Tree, total: dict[int, float], sign: int) -> tuple[int, ...]:
    out: list[int] = []
    stack: list[Tree] = [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, Leaf):
            out.append(item.node)
            continue
        children = list(item.children)
        if isinstance(item, Parallel) and sign:
            children.sort(key=lambda child: sign * total[id(child)])
        stack.extend(reversed(children))
    return tuple(out)


def _by_level(work: Sequence[float], predecessors: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """By the earliest time that a unit can start."""
    ends: list[float] = []
    starts: list[float] = []
    for unit, sources in enumerate(predecessors):
        starts.append(max((ends[s] for s in sources), default=0.0))
        ends.append(starts[-1] + work[unit])
    # A unit of no work starts with its successor: its own number keeps the order legal.
    return tuple(sorted(range(len(work)), key=lambda u: (starts[u], u)))


class Cut(NamedTuple):
    """Parts of an order: how many devices each has, and the part of each unit (by number)."""

    replicas: tuple[int, ...]
    assign: tuple[int, ...]


def cut(
    order: Sequence[int],
    cost: Mapping[int, Sequence[float]],
    speeds: Sequence[float],
    room: Sequence[float] | None = None,
    size: Sequence[float] | None = None,
) -> Cut | None:
    """Cuts an order into parts so that the slowest is as fast as it can be, and the rest even.

    With a bottleneck t given, let reach(k) be the furthest position that k devices can
    serve: the largest, over the sizes r of the last part, of how far a part of r devices gets
    from reach(k - r). As a part that starts later also ends no earlier, this is optimal for
    the order; a binary search finds the least t.

    Args:
        order: Units (all, or some of them) in a topological order.
        cost: For every part size r that may be used, the time of each unit (by number) on a
            part of r devices of speed 1, its share of the gradient reduction included.
        speeds: Speed of each device, in order; parts take devices from the left.
        room: Bytes that each device can hold, or None.
        size: Bytes of each unit, where ``room`` is given.

    Returns:
        The cut, or None where the bytes don't fit in any cut of this order.
    """
    devices, count = len(speeds), len(order)
    prefix = {r: _prefix(order, times) for r, times in cost.items() if r <= devices}
    weight = _prefix(order, size) if size is not None and room is not None else None
    uniform = min(speeds) == max(speeds)

    def furthest(start: int, device: int, r: int, limit: float) -> int:
        sums = prefix[r]
        speed = speeds[device] if uniform else min(speeds[device : device + r])
        stop = bisect_right(sums, sums[start] + limit * speed * (1 + 1e-12)) - 1
        if weight is not None and room is not None:
            least = min(room[device : device + r])
            stop = min(stop, bisect_right(weight, weight[start] + least * (1 + 1e-12)) - 1)
        return max(start, stop)

    plain = uniform and weight is None
    tables = list(prefix.items())

    def sweep(limit: float) -> tuple[list[int], list[int]]:
        reach, last = [0], [0]
        scaled = limit * speeds[0] * (1 + 1e-12)
        for k in range(1, devices + 1):
            best, size_of_best = reach[k - 1], 0
            for r, sums in tables:
                if r > k:
                    continue
                start = reach[k - r]
                if plain:
                    stop = bisect_right(sums, sums[start] + scaled, start) - 1
                else:
                    stop = furthest(start, k - r, r, limit)
                if stop > best:
                    best, size_of_best = stop, r
            reach.append(best)
            last.append(size_of_best)
            if best >= count:
                break
        return reach, last

    smallest = min(prefix)
    sums = prefix[smallest]
    # Any cut that closes a part as soon as it is full stays under the even share plus one unit.
    largest = max(b - a for a, b in pairwise(sums))
    high = (sums[-1] * smallest / sum(speeds) + largest) / min(speeds) * 1.000001 + 1e-9
    if sweep(high)[0][-1] < count:
        high = sums[-1] / min(speeds) * 1.000001 + 1e-9
        if sweep(high)[0][-1] < count:
            return None
    low = min(r * table[-1] for r, table in tables) / sum(speeds) * 0.999
    for _ in range(40):
        if high - low <= 1e-3 * high:
            break
        middle = (low + high) / 2
        if sweep(middle)[0][-1] >= count:
            high = middle
        else:
            low = middle
    reach, last = sweep(high)
    shape = _backtrack(reach, last)
    return Cut(*_even(shape, prefix, speeds, order, high, furthest))


def _prefix(order: Sequence[int], values: Sequence[float]) -> list[float]:
    return [0.0, *accumulate([values[unit] for unit in order])]


def _backtrack(reach: list[int], last: list[int]) -> list[int]:
    """Sizes of the parts from left to right."""
    shape: list[int] = []
    k = len(reach) - 1
    while k > 0:
        if last[k]:
            shape.append(last[k])
            k -= last[k]
        else:
            k -= 1
    return shape[::-1]


def _even(
    shape: list[int],
    prefix: Mapping[int, list[float]],
    speeds: Sequence[float],
    order: Sequence[int],
    limit: float,
    furthest: Callable[[int, int, int, float], int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Fills each part only up to an even share of what is left, as far as t allows."""
    count, parts = len(order), len(shape)
    first = [0]
    for r in shape:
        first.append(first[-1] + r)
    # The earliest start of each part from which it and the later ones still reach the end.
    earliest = [0] * parts + [count]
    for part in range(parts - 1, -1, -1):
        start = earliest[part + 1]
        while start and furthest(start - 1, first[part], shape[part], limit) >= earliest[part + 1]:
            start -= 1
        earliest[part] = start
    assign = [0] * (max(order) + 1)
    strength = [size * speeds[first[p]] for p, size in enumerate(shape)]
    behind = sum(strength)
    at = 0
    for part, r in enumerate(shape):
        sums = prefix[r]
        share = (sums[-1] - sums[at]) * strength[part] / behind
        behind -= strength[part]
        stop = bisect_right(sums, sums[at] + share) - 1
        if stop < count and sums[stop + 1] - sums[at] - share < share - (sums[stop] - sums[at]):
            stop += 1
        # Each later part needs a unit of its own.
        stop = min(max(stop, earliest[part + 1], at + 1), furthest(at, first[part], r, limit))
        stop = count if part == parts - 1 else min(stop, count - (parts - 1 - part))
        for position in range(at, stop):
            assign[order[position]] = part
        at = max(at, stop)
    return tuple(shape), tuple(assign)
