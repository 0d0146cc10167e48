"""The candidates that a search starts from: every copy count, micro-batch size and order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphpipe.graph.series_parallel import Tree, decompose
from graphpipe.planner.constructive import Cut, cut, orders
from graphpipe.planner.estimate import Estimate, estimate
from graphpipe.planner.layout import Layout
from graphpipe.planner.space import Space

Row = NDArray[np.floating[Any]]
"""A number for every unit."""

_LEAST_MOST = 64
_PER_DEVICE = 8
_MOST_TASKS = 20_000
"""A copy gets at most 64 micro-batches, or 8 for each of its devices where that makes no
more than about 20,000 tasks (some three stages a device)."""


class Freedom(NamedTuple):
    """What a search may vary.

    Attributes:
        copies: Values of R to try.
        micro_batches: r_s b_s to try, samples; None: sizes that divide a copy.
        replicas: Sizes of part to try, devices.
        recompute: ``auto`` (where memory asks for it), True (everywhere) or False.
        families: ``graph`` (stages are the connected pieces of parts), ``chain`` (each part
            one stage, run along true dependencies) and ``sequential`` (the same, one stage
            strictly after the other).
        parts: Exact number of parts, where the user wants one; else None.
    """

    copies: tuple[int, ...]
    micro_batches: tuple[int, ...] | None = None
    replicas: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8)
    recompute: bool | str = "auto"
    families: tuple[str, ...] = ("graph", "chain")
    parts: int | None = None


def micro_batch_sizes(samples: int, limit: int = 4096) -> list[int]:
    """Sizes to try for a copy of so many samples, largest first.

    Divisors of ``samples`` at most a factor 2 apart where there are such, at most ``limit``
    micro-batches; where a number has few divisors, also sizes with a short last micro-batch.
    """
    out = [samples]
    while out[-1] > 1 and -(-samples // out[-1]) < limit:
        half = max(1, -(-out[-1] // 2))
        exact = [b for b in range(half, max(half, out[-1] * 2 // 3) + 1) if samples % b == 0]
        out.append(exact[0] if exact else half)
    return out


class Plane(NamedTuple):
    """A point (R, devices of a copy, placement, size) with a guess of what it can reach at best.

    ``even``: ``batch`` is r_s b_s of every stage; else it is b_s of every stage.
    """

    bound: float
    copies: int
    devices: int
    far: bool
    batch: int
    even: bool


class Seed(NamedTuple):
    """A layout with its estimate, and the point that it comes from."""

    estimate: Estimate
    layout: Layout
    point: Plane


def planes(space: Space, freedom: Freedom, *, tiny: bool = False) -> list[Plane]:
    """All points to cut orders for, the most promising first.

    Sizes that give a copy far more micro-batches than it has devices cost efficiency and
    save no bubble; they are left out unless ``tiny`` (or named in ``freedom``).
    """
    world = space.cluster.world_size
    per_node = max(len(node) for node in space.cluster.nodes)
    out: list[Plane] = []
    for copies in freedom.copies:
        devices = world // copies
        if freedom.parts is not None:
            devices = min(devices, freedom.parts)
        devices = min(devices, max(len(space.units), 1) * max(freedom.replicas))
        samples = space.samples(copies)
        sizes = freedom.micro_batches or micro_batch_sizes(samples)
        most = max(_LEAST_MOST, min(_PER_DEVICE * devices, _MOST_TASKS // (6 * devices)))
        # Both placements are the same where everything lies in one node, or in one direction.
        same = copies == 1 or devices == 1 or world <= per_node
        for far in (False,) if same else (False, True):
            for batch in sizes:
                if batch > samples:
                    continue
                if not (tiny or freedom.micro_batches) and samples > batch * most:
                    continue
                for even in (True, False) if max(freedom.replicas) > 1 < devices else (True,):
                    point = Plane(0.0, copies, devices, far, batch, even)
                    rows = {r: _cost_row(space, point, r) for r in freedom.replicas}
                    costs = {r: row for r, row in rows.items() if row is not None}
                    if not costs or (not even and len(costs) == 1):
                        continue
                    table = np.array(list(costs.values()))
                    sizes_of_part = np.array(list(costs))[:, None]
                    total = float((table * sizes_of_part).min(axis=0).sum())
                    top = float(table.min(axis=0).max())
                    # Filling and draining cost a device about half of a micro-batch's way, and
                    # nothing where all devices are one part.
                    way = min(
                        0.5 * (1 - r / devices) * _way(space, batch // r if even else batch)
                        for r in costs
                    )
                    out.append(point._replace(bound=max(total / devices, top) + way))
    return sorted(out)


def _way(space: Space, batch: int) -> float:
    """Nanoseconds of one micro-batch forward and backward along the longest path."""
    found = space.ways.get(batch)
    if found is None:
        found = space.ways[batch] = _longest(space, batch)
    return found


def _longest(space: Space, batch: int) -> float:
    forward, backward = space.units.times(space.kinds[0], batch)
    ends: list[float] = []
    for u, sources in enumerate(space.units.predecessors):
        ends.append(max([ends[s] for s in sources], default=0.0) + forward[u] + backward[u])
    return max(ends)


def part_costs(space: Space, point: Plane, replicas: Iterable[int]) -> dict[int, list[float]]:
    """For each size of part the nanoseconds that each unit adds to it in one iteration."""
    out: dict[int, list[float]] = {}
    for r in replicas:
        row = _cost_row(space, point, r)
        if row is not None:
            out[r] = row.tolist()
    return out


def _cost_row(space: Space, point: Plane, r: int) -> Row | None:
    """The costs of a part of ``r`` devices; None if there are too few devices or samples."""
    samples = space.samples(point.copies)
    if r > point.devices:
        return None
    size = point.batch // r if point.even and point.batch % r == 0 else point.batch
    if size < 1 or (size != point.batch // r and r > 1 and size * r > samples):
        return None
    key = (point.copies, point.devices, point.far, size, r)
    found = space.rows.get(key)
    if found is not None:
        return found
    units = space.units
    slots = space.slots(point.copies, point.devices, point.far)
    fastest = max(space.kinds, key=lambda kind: (space.speed[kind], kind))
    reduced = np.array(units.optimizer_ns(fastest))
    if r * point.copies > 1:
        ranks = tuple(rank for slot in slots[-r:] for rank in slot)
        per_byte = space.all_reduce_ns(ranks, 1e9) * 1e-9
        reduced += per_byte * np.array(units.gradient_bytes)
    rounds = -(-samples // (size * r))
    row: Row = rounds * _both_ways(space, fastest, size) + reduced
    for u, fixed in enumerate(space.fixed):
        if fixed:
            helpers = 1 if fixed >= space.batch_size else r
            turns = -(-samples // (fixed * helpers))
            row[u] = turns * _both_ways(space, fastest, fixed)[u] + reduced[u]
    space.rows[key] = row
    return row


def _both_ways(space: Space, kind: str, size: int) -> Row:
    """Forward and backward nanoseconds of every unit."""
    forward, backward = space.units.times(kind, size)
    return np.array(forward, dtype=np.float64) + np.array(backward, dtype=np.float64)


class Orders:
    """Topological orders for each micro-batch size; the tree is built once."""

    def __init__(self, space: Space) -> None:
        self.space = space
        work = self._work(space.batch_size)
        self.tree: Tree = decompose(space.units.predecessors, work)
        self._known: dict[int, list[tuple[int, ...]]] = {}

    def _work(self, size: int) -> list[float]:
        kind = self.space.kinds[0]
        forward, backward = self.space.units.times(kind, size)
        return [float(f + b) for f, b in zip(forward, backward, strict=True)]

    def of(self, size: int) -> list[tuple[int, ...]]:
        """Orders by the work at a micro-batch size."""
        found = self._known.get(size)
        if found is None:
            found = self._known[size] = orders(
                self.tree, self._work(size), self.space.units.predecessors
            )
        return found


def seeds_at(
    space: Space, freedom: Freedom, point: Plane, known: Orders, *, quick: bool
) -> list[Seed]:
    """Cuts the orders at one point.

    Args:
        space: The search space.
        freedom: What may vary.
        point: Where to cut.
        known: The orders.
        quick: Only the first order, and only the first family.
    """
    costs = part_costs(space, point, freedom.replicas)
    slots = space.slots(point.copies, point.devices, point.far)
    devices = space.cluster.devices
    speeds = [min(space.speed[devices[k].kind] for k in slot) for slot in slots]
    room: list[float] | None = [min(space.memory[k] for k in slot) for slot in slots]
    if room and sum(space.units.static_bytes) <= min(room):
        room = None
    candidates = known.of(point.batch)[: 1 if quick else None]
    families = freedom.families[: 1 if quick else None]
    found: dict[Cut, None] = {}
    choices: list[tuple[int, ...]] = [freedom.replicas]
    if point.even and freedom.replicas != (1,):
        choices.append((1,))
        few = tuple(r for r in freedom.replicas if r <= 2)
        if few not in choices and not quick:
            choices.append(few)
        if space.any_whole:
            # Where a loss forbids copies, parts of equal size take their place.
            choices += [(r,) for r in freedom.replicas if r > 1]
    for order in candidates:
        for sizes in choices:
            cost = {r: row for r, row in costs.items() if r in sizes}
            piece = cut(order, cost, speeds, room, space.units.static_bytes) if cost else None
            if piece is None or (not point.even and max(piece.replicas) == 1):
                continue
            found[piece] = None
            if quick and not space.any_whole:
                break
    out = []
    for piece in found:
        seen: set[tuple[tuple[int, ...], ...]] = set()
        for family in families:
            layout = _layout(point, piece, family)
            structure = space.structure(layout.assign, layout.merged)
            if structure is None or (structure.stages in seen and not layout.sequential):
                continue
            seen.add(structure.stages)
            seed = fitted(space, layout, point, freedom.recompute)
            if seed is not None:
                out.append(seed)
    return out


def fitted(space: Space, layout: Layout, point: Plane, recompute: bool | str) -> Seed | None:
    """Gives up slack, then recomputes on the parts that lack memory, until the layout fits.

    Returns:
        The layout that fits, or else the one that lacks least; None if it is not legal.
    """
    if space.pin:
        pinned = with_pins(space, layout)
        if pinned is None:
            return None
        layout = pinned
    parts = len(layout.replicas)
    if recompute is True:
        layout = layout._replace(recompute=(True,) * parts)
    value = estimate(space, layout)
    if value is None or value.lacking <= 0:
        return None if value is None else Seed(value, layout, point)
    if layout.slack:
        layout = layout._replace(slack=0)
        value = estimate(space, layout)
    if value is None or value.lacking <= 0 or recompute != "auto":
        return None if value is None else Seed(value, layout, point)
    flags = tuple(layout.recomputes(part) or lack > 0 for part, lack in enumerate(value.lack))
    layout = layout._replace(recompute=flags)
    value = estimate(space, layout)
    return None if value is None else Seed(value, layout, point)


def with_pins(space: Space, layout: Layout) -> Layout | None:
    """Moves pinned units so that each pinned rank is one part's, and no part has two; None if
    there are too few parts.

    The part that already holds most of a rank's units becomes that rank's.
    """
    assign = list(layout.assign)
    count: dict[tuple[int, int], int] = {}
    for u, rank in space.pin.items():
        count[rank, assign[u]] = count.get((rank, assign[u]), 0) + 1
    home: dict[int, int] = {}
    for (rank, part), _ in sorted(count.items(), key=lambda item: (-item[1], item[0])):
        if rank not in home and part not in home.values():
            home[rank] = part
    for rank in sorted({*space.pin.values()} - set(home)):
        free = [p for p in range(len(layout.replicas)) if p not in home.values()]
        if not free:
            return None
        home[rank] = free[0]
    for u, rank in space.pin.items():
        assign[u] = home[rank]
    return layout._replace(assign=tuple(assign))


def _layout(point: Plane, piece: Cut, family: str) -> Layout:
    return Layout(
        point.copies,
        piece.replicas,
        piece.assign,
        point.batch,
        () if point.even else tuple(point.batch * r for r in piece.replicas),
        slack=1,
        merged=family != "graph",
        sequential=family == "sequential",
        far=point.far,
    )
