"""Shapes become stages: whole, in order, balanced, and lying where the layout says."""

from __future__ import annotations

import pytest

from graphpipe.cost.cluster import Cluster
from graphpipe.cost.published.build import GraphFile, Node
from graphpipe.planner.branches import splits
from graphpipe.planner.colocate import LAYOUTS, Ground, Shape, build, shapes
from graphpipe.planner.interleave import TO_AND_FRO
from graphpipe.planner.seeds import Freedom
from graphpipe.planner.space import Space
from graphpipe.planner.stacked import checked
from tests.planner.synthetic import cluster_of, graph_of, towers, units_of


def encoder_and_trunk(layers: int, trunk: int) -> GraphFile:
    """A branch of equal layers and a light second source before a trunk."""
    names = [f"e.{i}" for i in range(layers)] + ["text"] + [f"t.{i}" for i in range(trunk)]
    nodes = [
        Node(
            id=name,
            forward=1e-5 if name == "text" else 1e-3,
            backward=2e-5 if name == "text" else 2e-3,
            parameter_bytes=4e6,
            saved_bytes=1e6,
            output_bytes=1e5,
        )
        for name in names
    ]
    edges = [(f"e.{i}", f"e.{i + 1}") for i in range(layers - 1)]
    edges += [(f"e.{layers - 1}", "t.0"), ("text", "t.0")]
    edges += [(f"t.{i}", f"t.{i + 1}") for i in range(trunk - 1)]
    return graph_of(nodes, edges)


def ground(devices: int = 4, batch: int = 16, *, branches: int = 2) -> Ground:
    units = units_of(towers(2, 6, 24) if branches == 2 else encoder_and_trunk(6, 24))
    cluster: Cluster = cluster_of(devices, bandwidth=1e10)
    space = Space(
        units,
        cluster,
        batch,
        tuple(float(d.memory_bytes) for d in cluster.devices),
        (0,) * len(units),
    )
    forward, backward = units.times(space.kinds[0], 1)
    split = splits(units, [float(f + b) for f, b in zip(forward, backward, strict=True)])[0]
    assert len(split.branches) == branches
    return Ground(space, split)


FREEDOM = Freedom((1, 2))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_shape_holds_each_unit_once_in_order(layout: str) -> None:
    made = ground()
    tried = 0
    for shape in shapes(made, FREEDOM, (layout,)):
        candidate = build(made, shape)
        if candidate is None:
            continue
        tried += 1
        assert checked(made.space, candidate.stages)
        assert all(slot < shape.devices for stage in candidate.stages for slot in stage.slots)
    assert tried


def test_layouts_lie_where_they_say() -> None:
    made = ground()
    inside = {u for piece in made.split.branches for u in piece}

    def branch_slots(layout: str, **options: int) -> list[tuple[int, ...]]:
        shape = Shape(layout, 1, 4, False, 2, 2, branch_batch=2, **options)
        candidate = build(made, shape)
        assert candidate is not None
        return [stage.slots for stage in candidate.stages if set(stage.units) <= inside]

    assert branch_slots("everywhere") == [(0, 1, 2, 3)] * 2
    assert branch_slots("few", helpers=2) == [(0, 1)] * 2
    assert branch_slots("apart", helpers=1) == [(0,)] * 2
    assert branch_slots("spread") == [(0,), (1,), (2,), (3,)] * 2
    assert {slot for slots in branch_slots("first") for slot in slots} <= {0, 1, 2, 3}


def test_a_trunk_lies_apart_from_branches_with_devices_of_their_own() -> None:
    made = ground()
    candidate = build(made, Shape("apart", 1, 4, False, 2, 2, helpers=1, branch_batch=4))
    assert candidate is not None
    inside = {u for piece in made.split.branches for u in piece}
    for stage in candidate.stages:
        assert (stage.slots == (0,)) == (set(stage.units) <= inside)
        assert stage.micro_batch == (4 if set(stage.units) <= inside else 2)


@pytest.mark.parametrize("layout", ["everywhere", "few", "spread", "first"])
def test_devices_are_balanced(layout: str) -> None:
    made = ground(branches=1)
    for turns, way in ((1, "round"), (2, "round"), (2, TO_AND_FRO)):
        shape = Shape(layout, 1, 4, False, 2, turns, way, helpers=1, branch_batch=2)
        hosting = made.hosting(shape)
        assert hosting is not None
        busy = hosting.busy_ns
        largest = 2 * max(made.work(1, 2))
        assert max(busy) - min(busy) <= largest


def test_no_shape_replicates_where_that_is_not_allowed() -> None:
    made = ground()
    freedom = Freedom((1,), replicas=(1,))
    for shape in shapes(made, freedom):
        candidate = build(made, shape)
        assert candidate is None or all(len(stage.slots) == 1 for stage in candidate.stages)


def test_only_sizes_that_the_user_allows() -> None:
    made = ground()
    for shape in shapes(made, Freedom((1,), micro_batches=(2, 4))):
        assert {shape.batch, shape.branch_batch} <= {2, 4}
