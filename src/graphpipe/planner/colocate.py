"""Layouts in which a trunk and the branches before it share devices.

A :class:`Shape` says in a few numbers how: the trunk is cut into pieces, one or several for
each device; each branch is

- ``everywhere``: replicated on every device of the trunk;
- ``few``: replicated on the first devices only, which get less of the trunk;
- ``spread``: cut into as many pieces as there are devices, one beside each stage of the trunk;
- ``first``: before the trunk in the order that is cut;
- ``apart``: replicated on devices of its own;
- ``chain``: like ``first``, but a device runs what it holds of both as one stage.

:func:`build` makes the stages of a shape, :func:`shapes` lists the shapes to try.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graphpipe.plan.problem import EdgeSpec
from graphpipe.planner.branches import Split
from graphpipe.planner.interleave import (
    ROUND,
    TO_AND_FRO,
    device_shares,
    devices_of,
    pieces_of,
)
from graphpipe.planner.seeds import Freedom, micro_batch_sizes
from graphpipe.planner.space import Space, stage_edges
from graphpipe.planner.stacked import Hosted, Hosting, Stacked, checked

LAYOUTS = ("everywhere", "few", "spread", "first", "apart", "chain")

_MOST_TASKS = 6000
"""Shapes with more tasks a copy are left out: they take seconds to schedule and overhead to run."""


class Shape(NamedTuple):
    """How trunk and branches lie on the devices of a copy.

    Attributes:
        layout: Of the branches, see the module.
        copies: R.
        devices: Devices of a copy.
        far: Put the copies of a device side by side.
        batch: b of the trunk, samples.
        turns: Pieces of the trunk for each device.
        way: How the pieces go round the devices.
        helpers: Devices of the branches, for ``few`` and ``apart``.
        branch_batch: b of the branches, samples.
        fixed_order: Run the trunk in the order of interleaved 1F1B.
        extra: Forwards that this order starts with beyond what fills the pipeline.
        depth_share: Of :class:`~graphpipe.planner.stacked.Stacked`.
        slack: Quanta added to every in-flight bound.
        branch_slack: Quanta added to those of the branches, besides.
        recompute: Stages that recompute, by number.
        tilt: Share of its work that the first device of the trunk gets more than the mean, and
            the last one less.
    """

    layout: str
    copies: int
    devices: int
    far: bool
    batch: int
    turns: int
    way: str = ROUND
    helpers: int = 0
    branch_batch: int = 0
    fixed_order: bool = False
    extra: int = 0
    depth_share: float = 0.5
    slack: int = 0
    branch_slack: int = 0
    recompute: frozenset[int] = frozenset()
    tilt: float = 0.0


@dataclass(eq=False)
class Ground:
    """A split of the model with what shapes of it have in common.

    Attributes:
        space: The search space.
        split: Trunk and branches.
    """

    space: Space
    split: Split
    _work: dict[tuple[int, int], tuple[float, ...]] = field(default_factory=dict)
    _edges: dict[tuple[tuple[int, ...], ...], tuple[EdgeSpec, ...]] = field(default_factory=dict)

    def work(self, copies: int, size: int) -> tuple[float, ...]:
        """Nanoseconds that each unit adds to the iteration of a device that holds it alone."""
        key = (self.space.samples(copies), size)
        if key not in self._work:
            forward, backward = self.space.units.times(self.space.kinds[0], size)
            rounds = key[0] / size
            steps = self.space.units.optimizer_ns(self.space.kinds[0])
            self._work[key] = tuple(
                rounds * (f + b) + step for f, b, step in zip(forward, backward, steps, strict=True)
            )
        return self._work[key]

    def hosting(self, shape: Shape) -> Hosting | None:
        """A shape in numbers; None if it is not legal or its parameters don't fit."""
        candidate = build(self, shape)
        if candidate is None:
            return None
        found = Hosting(self.space, candidate)
        if found.times is None:
            return None
        key = tuple(stage.units for stage in candidate.stages)
        if key not in self._edges:
            if len(self._edges) > _MOST_KEPT:
                self._edges.clear()
            self._edges[key] = stage_edges(self.space.units, key, found.facts)
        found.edges = self._edges[key]
        return found if found.static_fits else None

    @property
    def branch_share(self) -> float:
        """Share of the work that is in branches."""
        space = self.space
        work = self.work(1, max(1, space.batch_size // (4 * space.cluster.world_size)))
        return sum(work[u] for branch in self.split.branches for u in branch) / sum(work)

    def guess_ns(self, shape: Shape) -> float:
        """What a shape may take, roughly: the work of a device, or that of the trunk with its
        bubble."""
        work = self.work(shape.copies, shape.batch)
        trunk = sum([work[u] for u in self.split.trunk])
        branch = self.work(shape.copies, shape.branch_batch)
        other = sum([branch[u] for piece in self.split.branches for u in piece])
        devices = shape.devices - (shape.helpers if shape.layout == "apart" else 0)
        if shape.layout == "apart":
            even = max(trunk / devices, other / shape.helpers)
        else:
            even = (trunk + other) / devices
        rounds = self.space.samples(shape.copies) / shape.batch
        return max(even, trunk / devices * (1 + (devices - 1) / (shape.turns * rounds)))


_MOST_KEPT = 5000


def shapes(
    ground: Ground,
    freedom: Freedom,
    layouts: Sequence[str] = LAYOUTS,
    turns: Sequence[int] = (1, 2, 4),
) -> Iterator[Shape]:
    """The shapes to start from, without those that freedom or the number of tasks rule out.

    Args:
        ground: What is laid out.
        freedom: What may vary.
        layouts: Of the branches.
        turns: Pieces of the trunk for each device.
    """
    space, split = ground.space, ground.split
    world = space.cluster.world_size
    per_node = max(len(node) for node in space.cluster.nodes)
    most = max(freedom.replicas)
    share = ground.branch_share
    for copies in freedom.copies:
        devices = min(world // copies, len(split.trunk))
        if devices < 2:
            continue
        samples = space.samples(copies)
        sizes = [b for b in freedom.micro_batches or micro_batch_sizes(samples) if b <= samples]
        for far in (False,) if copies == 1 or world <= per_node else (False, True):
            for batch in sizes:
                for layout in _layouts(layouts, split, most):
                    for helpers in _helpers(layout, devices, most, share):
                        for branch_batch in _branch_sizes(
                            layout, sizes, batch, samples, helpers or devices
                        ):
                            base = Shape(
                                layout,
                                copies,
                                devices,
                                far,
                                batch,
                                1,
                                helpers=helpers,
                                branch_batch=branch_batch,
                            )
                            yield from _turned(base, split, samples, turns)


def _layouts(layouts: Sequence[str], split: Split, most: int) -> Sequence[str]:
    """Those that make sense: some replicate a stage, most need a branch."""
    if split.branches:
        return [name for name in layouts if most > 1 or name != "everywhere"]
    return ("chain",) if "chain" in layouts else ()


def _helpers(layout: str, devices: int, most: int, share: float) -> list[int]:
    """Numbers of devices for the branches; 0 where the layout says it.

    Args:
        layout: Of the branches.
        devices: Devices of a copy.
        most: Largest size of a replicated stage.
        share: Share of the work that is in branches.
    """
    if layout == "few":
        return [k for k in (1, 2, 4, 8) if k < devices and k <= most]
    if layout == "apart":
        even = share * devices
        wanted = {1, int(even), int(even) + 1}
        return [k for k in sorted(wanted) if 1 <= k < devices and k <= most]
    return [0]


def _branch_sizes(
    layout: str, sizes: Sequence[int], batch: int, samples: int, replicas: int
) -> list[int]:
    """Sizes for the branches: that of the trunk, and larger ones that it divides."""
    if layout == "chain":
        return [batch]
    out = [b for b in sizes if b % batch == 0 and b <= 4 * batch]
    if layout in ("everywhere", "few", "apart"):
        # Each replica needs a micro-batch, or it stands still.
        out = [b for b in out if b * replicas <= samples] or [batch]
    return out


def _turned(base: Shape, split: Split, samples: int, turns: Sequence[int]) -> Iterator[Shape]:
    devices = base.devices - (base.helpers if base.layout == "apart" else 0)
    if devices < 2:
        return
    rounds = -(-samples // base.batch)
    for count in turns:
        if devices * count > len(split.trunk) or 2 * devices * count * rounds > _MOST_TASKS:
            continue
        shape = base._replace(turns=count)
        if count > 1:
            yield shape
            yield shape._replace(way=TO_AND_FRO)
        if rounds % devices == 0 or count == 1:
            yield shape._replace(fixed_order=True)


def build(ground: Ground, shape: Shape) -> Stacked | None:
    """The stages of a shape; None if it makes no legal ones."""
    space, split = ground.space, ground.split
    every = range(shape.devices)
    if shape.layout == "apart":
        helpers = list(every)[: shape.helpers]
        hosts = list(every)[shape.helpers :]
    elif shape.layout == "few":
        helpers, hosts = list(every)[: shape.helpers], list(every)
    else:
        helpers, hosts = list(every), list(every)
    work = ground.work(shape.copies, shape.batch)
    branch_work = ground.work(shape.copies, shape.branch_batch)
    parts = shape.turns * len(hosts)
    if shape.layout in ("first", "chain"):
        stages, trunk = _in_one_order(split, shape, hosts, parts, work, branch_work)
    else:
        stages, trunk = _side_by_side(split, shape, helpers, hosts, parts, work, branch_work)
    if not stages or not checked(space, stages):
        return None
    stages = [stage._replace(recompute=s in shape.recompute) for s, stage in enumerate(stages)]
    ordered = shape.fixed_order and bool(trunk) and shape.way == ROUND
    return Stacked(
        shape.copies,
        shape.devices,
        tuple(stages),
        shape.depth_share,
        shape.far,
        tuple(trunk) if ordered else (),
        shape.extra,
    )


def _tilted(shares: list[float], hosts: Sequence[int], where: Sequence[int], tilt: float) -> None:
    """Gives pieces on the first hosts more and those on the last less."""
    if not tilt or len(hosts) < 2:
        return
    place = {device: i for i, device in enumerate(hosts)}
    for piece, device in enumerate(where):
        shares[piece] *= 1 + tilt * (1 - 2 * place[device] / (len(hosts) - 1))


def _side_by_side(
    split: Split,
    shape: Shape,
    helpers: Sequence[int],
    hosts: Sequence[int],
    parts: int,
    work: Sequence[float],
    branch_work: Sequence[float],
) -> tuple[list[Hosted], list[int]]:
    """Branches, then the trunk cut so that every device has as much to do."""
    stages: list[Hosted] = []
    load = [0.0] * shape.devices
    for branch in split.branches:
        slack = shape.slack + shape.branch_slack
        if shape.layout == "spread":
            count = min(len(helpers), len(branch))
            pieces = pieces_of(branch, branch_work, [1.0] * count)
            for device, piece in zip(helpers, pieces or [], strict=False):
                stages.append(_hosted(piece, device, shape.branch_batch, slack))
                load[device] += sum(branch_work[u] for u in piece)
        else:
            stages.append(Hosted(branch, tuple(helpers), shape.branch_batch, slack=slack))
            for device in helpers:
                load[device] += sum(branch_work[u] for u in branch) / len(helpers)
    total = sum(work[u] for u in split.trunk)
    shares = device_shares(parts, hosts, shape.way, load, total)
    where = devices_of(parts, hosts, shape.way)
    _tilted(shares, hosts, where, shape.tilt)
    pieces = pieces_of(split.trunk, work, shares, where, load)
    if pieces is None:
        return [], []
    trunk = [len(stages) + i for i in range(parts)]
    for piece, device in zip(pieces, where, strict=True):
        stages.append(_hosted(piece, device, shape.batch, shape.slack))
    return stages, trunk


def _in_one_order(
    split: Split,
    shape: Shape,
    hosts: Sequence[int],
    parts: int,
    work: Sequence[float],
    branch_work: Sequence[float],
) -> tuple[list[Hosted], list[int]]:
    """Branches and trunk cut as one order; pieces across the border are two stages, but for
    ``chain``."""
    before = [u for branch in split.branches for u in branch]
    inside = set(before)
    order = [*before, *split.trunk]
    both = [branch_work[u] if u in inside else work[u] for u in range(len(order))]
    where = devices_of(parts, hosts, shape.way)
    shares = [1.0] * parts
    _tilted(shares, hosts, where, shape.tilt)
    pieces = pieces_of(order, both, shares, where)
    if pieces is None:
        return [], []
    stages: list[Hosted] = []
    for piece, device in zip(pieces, where, strict=True):
        if shape.layout == "chain":
            stages.append(_hosted(piece, device, shape.batch, shape.slack))
            continue
        slack = shape.slack + shape.branch_slack
        for branch in split.branches:
            members = set(branch)
            mine = [u for u in piece if u in members]
            if mine:
                stages.append(_hosted(mine, device, shape.branch_batch, slack))
        mine = [u for u in piece if u not in inside]
        if mine:
            stages.append(_hosted(mine, device, shape.batch, shape.slack))
    trunk = list(range(parts)) if shape.layout == "chain" else []
    return stages, trunk


def _hosted(units: Sequence[int], device: int, batch: int, slack: int) -> Hosted:
    return Hosted(tuple(sorted(units)), (device,), batch, slack=slack)
