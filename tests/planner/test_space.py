"""What a layout means: its sizes, and the layouts that mean nothing."""

from __future__ import annotations

import pytest

from graphpipe.planner.estimate import estimate
from graphpipe.planner.evaluate import score
from graphpipe.planner.layout import Layout
from graphpipe.planner.space import Space
from tests.planner.synthetic import cluster_of, towers, units_of


def space_of(devices: int, batch: int) -> Space:
    units = units_of(towers(2, 1, 1))
    room = (2.0**40,) * devices
    return Space(units, cluster_of(devices), batch, room, (0,) * len(units))


@pytest.mark.parametrize("part_batch", [(0, 1), (1, 0), (32, 1)])
def test_sizes_that_cannot_be_are_not_legal(part_batch: tuple[int, ...]) -> None:
    space = space_of(3, 8)
    layout = Layout(1, (2, 1), (0, 0, 1), 1, part_batch=part_batch)
    assert estimate(space, layout) is None
    assert score(space, layout) is None


def test_equal_shares_of_replicas() -> None:
    space = space_of(3, 8)
    layout = Layout(1, (2, 1), (0, 0, 1), 4)
    problem = space.problem(layout)
    assert problem is not None
    assert [stage.micro_batch for stage in problem.stages if stage.replicas == 2] == [2]
    assert [stage.micro_batch for stage in problem.stages if stage.replicas == 1] == [4]


def test_a_schedule_is_made_once() -> None:
    space = space_of(2, 8)
    one = score(space, Layout(1, (1, 1), (0, 0, 1), 4, slack=2))
    two = score(space, Layout(1, (1, 1), (0, 0, 1), 4, slack=3))
    assert one is not None
    assert two is not None
    assert one.graph is two.graph
    assert one.timed == two.timed
