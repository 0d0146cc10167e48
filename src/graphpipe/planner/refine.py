"""Local moves on layouts.

``polish`` shifts units from the part that bounds the iteration to others, judged by the
estimate. Which moves are worth an estimate is decided by arithmetic on the loads alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from graphpipe.planner.estimate import Estimate, estimate
from graphpipe.planner.layout import Layout
from graphpipe.planner.seeds import Seed, part_costs
from graphpipe.planner.space import Space

_TRIES = 5
"""Moves that get an exact estimate before a layout counts as a local optimum."""


def polish(space: Space, seed: Seed, steps: int) -> Seed:
    """Moves units, and swaps pairs, while the largest load falls.

    Args:
        space: The search space.
        seed: Where to start.
        steps: The most estimates to spend.

    Returns:
        The best layout found; never worse than ``seed`` by the estimate.
    """
    current = seed
    sizes = set(seed.layout.replicas)
    costs = part_costs(space, seed.point, sizes)
    if not sizes <= set(costs):
        return seed
    spent = 0
    while spent < steps:
        better: Seed | None = None
        load = current.estimate.load
        worst = max(range(len(load)), key=lambda p: load[p])
        for move in _moves(space, current, costs, worst):
            spent += 1
            candidate = current.layout._replace(assign=move)
            value = estimate(space, candidate)
            if value is not None and _beats(value, current.estimate):
                better = Seed(value, candidate, seed.point)
                break
            if spent >= steps:
                break
        if better is None:
            break
        current = better
    return current


def _beats(new: Estimate, old: Estimate) -> bool:
    """Fits at least as well, and the sorted loads are smaller, the largest first."""
    if (new.lacking > 0) != (old.lacking > 0):
        return new.lacking < old.lacking
    if new.iteration_ns != old.iteration_ns:
        return new.iteration_ns < old.iteration_ns
    return sorted(new.load, reverse=True) < sorted(old.load, reverse=True)


def packed(space: Space, layout: Layout) -> Layout | None:
    """The layout with its parts placed so that replicated ones lie within a node each, single
    ones filling the gaps; None where that changes nothing.

    Parts keep their order but for those that are drawn forward into a gap.
    """
    width = layout.copies if layout.far else 1
    nodes = [len(node) // width for node in space.cluster.nodes]
    if layout.devices == len(layout.replicas) or len(nodes) < 2 or min(nodes) < 1:
        return None
    waiting = list(range(len(layout.replicas)))
    place: list[int] = []
    for size in nodes:
        left = size
        while left and waiting:
            fitting = [p for p in waiting if layout.replicas[p] <= left]
            if not fitting:
                break
            # Exactly what fills the node, if there is such; else the next in order.
            exact = [p for p in fitting if layout.replicas[p] == left]
            chosen = exact[0] if exact and layout.replicas[waiting[0]] > left else fitting[0]
            place.append(chosen)
            waiting.remove(chosen)
            left -= layout.replicas[chosen]
    place += waiting
    if place == list(layout.place or range(len(layout.replicas))):
        return None
    return layout._replace(place=tuple(place))


def moved(space: Space, seed: Seed, parts: int) -> Iterator[Seed]:
    """Layouts with a unit moved away from one of the ``parts`` most loaded parts, or swapped for
    a smaller one, with their estimates; the most loaded part first."""
    costs = part_costs(space, seed.point, set(seed.layout.replicas))
    load = seed.estimate.load
    if not set(seed.layout.replicas) <= set(costs):
        return
    for part in sorted(range(len(load)), key=lambda p: -load[p])[:parts]:
        for move in _moves(space, seed, costs, part):
            candidate = seed.layout._replace(assign=move)
            value = estimate(space, candidate)
            if value is not None:
                yield Seed(value, candidate, seed.point)


def transfers(space: Space, seed: Seed, allowed: Collection[int]) -> Iterator[Layout]:
    """Layouts in which the most loaded part has one device more, taken from one of the least
    loaded parts (which shrinks, or hands its units to another), or from the idle ones."""
    layout, load = seed.layout, seed.estimate.load
    if space.pin:
        return
    parts = range(len(load))
    worst = max(parts, key=lambda p: load[p])
    more = layout.replicas[worst] + 1
    if more not in allowed:
        more = next((r for r in sorted(allowed) if r > more), 0)
    if not more:
        return
    wanted = more - layout.replicas[worst]
    idle = space.cluster.world_size // layout.copies - layout.devices
    if idle >= wanted:
        yield _resized(layout, {worst: more})
        return
    light = sorted((p for p in parts if p != worst), key=lambda p: load[p])[:4]
    for part in light:
        left = layout.replicas[part] - wanted
        if left >= 1 and left in allowed:
            yield _resized(layout, {worst: more, part: left})
        elif left == 0:
            for heir in light:
                if heir != part:
                    yield _without(_resized(layout, {worst: more}), part, heir)


def climb(space: Space, seed: Seed, allowed: Collection[int], rounds: int) -> tuple[Seed, int]:
    """Transfers devices while the estimate falls, each time by the transfer that helps most.

    Returns:
        The best layout, and how many estimates it took.
    """
    current, spent = seed, 0
    for _ in range(rounds):
        better = current
        for layout in transfers(space, current, allowed):
            spent += 1
            value = estimate(space, layout)
            if value is not None and _beats(value, better.estimate):
                better = Seed(value, layout, seed.point)
        if better is current:
            break
        current = better
    return current, spent


def _resized(layout: Layout, sizes: Mapping[int, int]) -> Layout:
    """Parts with other numbers of devices; their micro-batches stay as they are."""
    replicas = tuple(sizes.get(p, r) for p, r in enumerate(layout.replicas))
    batches = layout.part_batch
    if batches:
        batches = tuple(
            b // old * new for b, old, new in zip(batches, layout.replicas, replicas, strict=True)
        )
    return layout._replace(replicas=replicas, part_batch=batches, place=())


def _without(layout: Layout, part: int, heir: int) -> Layout:
    """A part's units are another's, and the part is gone."""
    assign = [heir if p == part else p for p in layout.assign]

    def drop(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*values[:part], *values[part + 1 :]) if values else values

    return layout._replace(
        replicas=drop(layout.replicas),
        assign=tuple(p - (p > part) for p in assign),
        part_batch=drop(layout.part_batch),
        recompute=drop(layout.recompute),
        place=(),
    )


def every_move(space: Space, layout: Layout) -> Iterator[Layout]:
    """All layouts that differ by the part of one unit or of two, or by one device more or less
    in a part: for graphs so small that they can all be tried."""
    parts, world = len(layout.replicas), space.cluster.world_size // layout.copies
    free = [u for u in range(len(layout.assign)) if u not in space.pin]
    for u in free:
        for part in range(parts):
            if part != layout.assign[u]:
                yield layout._replace(assign=_with(layout.assign, u, part))
    for i, u in enumerate(free):
        for v in free[i + 1 :]:
            if layout.assign[u] != layout.assign[v]:
                swapped = _with(_with(layout.assign, u, layout.assign[v]), v, layout.assign[u])
                yield layout._replace(assign=swapped)
    if layout.part_batch or layout.place or space.pin:
        return
    for part, count in enumerate(layout.replicas):
        for other in (count - 1, count + 1):
            if other >= 1 and layout.devices - count + other <= world:
                yield layout._replace(replicas=_with(layout.replicas, part, other))
    if layout.devices < world:
        for u in free:
            grown = (*layout.replicas, 1)
            yield layout._replace(replicas=grown, assign=_with(layout.assign, u, parts))


def _with(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _moves(
    space: Space, seed: Seed, costs: dict[int, list[float]], worst: int
) -> Iterator[tuple[int, ...]]:
    """Assignments with one unit moved away from part ``worst``, or swapped for a smaller one,
    the most promising first; at most ``_TRIES``."""
    layout, load = seed.layout, seed.estimate.load
    assign, replicas = layout.assign, layout.replicas
    units = space.units
    limit = load[worst]
    mine = [u for u, p in enumerate(assign) if p == worst and u not in space.pin]
    order = sorted(range(len(load)), key=lambda p: load[p])
    spare = order[:3]
    scored: list[tuple[float, float, tuple[tuple[int, int], ...]]] = []
    cost_here = costs[replicas[worst]]
    at_edge: dict[int, list[int]] = {}
    for u in mine:
        around = {assign[v] for v in (*units.predecessors[u], *units.successors[u])} - {worst}
        # A unit inside a stage may leave it too, but a unit at its edge costs no new message.
        inner = not around
        targets = around if not inner else set()
        for q in (*sorted(targets), *spare):
            if q == worst:
                continue
            new = load[q] + costs[replicas[q]][u]
            top = max(new, limit - cost_here[u])
            if top < limit:
                penalty = 0.02 * limit if q not in around else 0.0
                scored.append((top + penalty, float(u), ((u, q),)))
            elif q in around:
                if q not in at_edge:
                    at_edge[q] = _edge_units(space, assign, q, worst)
                table = costs[replicas[q]]
                for w in at_edge[q]:
                    gain = cost_here[u] - cost_here[w]
                    if gain <= 0:
                        continue
                    both = max(limit - gain, load[q] + table[u] - table[w])
                    if both < limit:
                        scored.append((both, float(u), ((u, q), (w, worst))))
    scored.sort()
    seen = set()
    for _, _, changes in scored:
        if changes in seen:
            continue
        seen.add(changes)
        new_assign = list(assign)
        for u, q in changes:
            new_assign[u] = q
        yield tuple(new_assign)
        if len(seen) >= _TRIES:
            return


def _edge_units(space: Space, assign: tuple[int, ...], part: int, towards: int) -> list[int]:
    """Units of ``part`` that pass something to or from units of ``towards``."""
    units = space.units
    return [
        u
        for u, p in enumerate(assign)
        if p == part
        and u not in space.pin
        and any(assign[v] == towards for v in (*units.predecessors[u], *units.successors[u]))
    ]
