"""What is trunk and what is branch."""

from __future__ import annotations

from graphpipe.cost.published.build import KIND, Node
from graphpipe.planner.branches import splits
from graphpipe.planner.unit_graph import UnitGraph
from tests.planner.synthetic import graph_of, towers, units_of


def work_of(units: UnitGraph) -> list[float]:
    forward, backward = units.times(KIND, 1)
    return [float(f + b) for f, b in zip(forward, backward, strict=True)]


def names(units: UnitGraph, members: tuple[int, ...]) -> list[str]:
    return [units.graph.ops[op].name for u in members for op in units.members[u]]


def test_branches_are_what_lies_before_the_place_where_they_meet() -> None:
    units = units_of(towers(2, 3, 8))
    split = splits(units, work_of(units))[0]
    assert names(units, split.trunk) == [f"t.{i}" for i in range(8)]
    assert sorted(names(units, piece) for piece in split.branches) == [
        ["b0.0", "b0.1", "b0.2"], ["b1.0", "b1.1", "b1.2"]
    ]  # fmt: skip


def test_a_light_branch_goes_with_the_trunk() -> None:
    units = units_of(towers(2, 3, 8))
    work = work_of(units)
    light = [u for u in range(len(units)) if names(units, (u,))[0].startswith("b1")]
    for u in light:
        work[u] = 1.0
    split = splits(units, work)[0]
    assert len(split.branches) == 1
    # It comes first, so that nothing that it feeds stands before it.
    assert list(split.trunk[:3]) == light


def test_a_chain_is_a_trunk_alone() -> None:
    units = units_of(towers(1, 3, 8))
    assert [split.branches for split in splits(units, work_of(units))] == [()]


def test_a_small_trunk_is_none() -> None:
    units = units_of(towers(4, 8, 2))
    (split,) = splits(units, work_of(units))
    assert split.branches == ()
    assert len(split.trunk) == len(units)


def test_a_frozen_part_before_a_trained_one_is_a_branch() -> None:
    file = towers(1, 4, 10)
    nodes = [f"b0.{i}" for i in range(4)]

    made = graph_of(
        [
            Node(
                id=op.name,
                forward=1e-3,
                backward=0.0 if op.name in nodes else 2e-3,
                trainable=op.name not in nodes,
                parameter_bytes=1e6,
                saved_bytes=1e5,
                output_bytes=1e4,
            )
            for op in file.graph.ops
        ],
        [(source, op.name) for op in file.graph.ops for source in op.inputs],
    )
    units = units_of(made)
    split = splits(units, work_of(units))[0]
    assert [names(units, piece) for piece in split.branches] == [nodes]
