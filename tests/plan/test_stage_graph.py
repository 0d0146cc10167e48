"""Depth of stage graphs."""

from __future__ import annotations

import pytest

from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec
from graphpipe.plan.stage_graph import depth
from tests.plan.plans import plan_of


@pytest.mark.parametrize(
    ("edges", "want"),
    [([], 1), ([(0, 1), (1, 2), (2, 3)], 4), ([(0, 3), (1, 3), (2, 3)], 2), ([(0, 2), (1, 2)], 2)],
)
def test_depth_is_the_longest_path(edges: list[tuple[int, int]], want: int) -> None:
    stages = tuple(StageSpec(1, 1, 1, 4, (r,), 1, 2) for r in range(4))
    problem = PipelineProblem(stages, tuple(EdgeSpec(*edge) for edge in edges), 4, 4)
    assert depth(plan_of(problem)) == want
