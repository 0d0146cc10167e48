"""GPipe: all forwards first."""

from __future__ import annotations

import pytest

from graphpipe.errors import ScheduleError
from graphpipe.plan.builders import gpipe
from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec


def test_forwards_then_backwards_with_everything_in_flight() -> None:
    stages = (StageSpec(1, 1, 1, 1, (0,), 1, 2), StageSpec(2, 2, 1, 1, (1, 2), 2, 4))
    built = gpipe(PipelineProblem(stages, (EdgeSpec(0, 1),), 6, 3))
    assert list(built.schedule().lines) == [
        "F0.0 F0.1 F0.2 F0.3 F0.4 F0.5 B0.0 B0.1 B0.2 B0.3 B0.4 B0.5",
        "F1.0 F1.2 B1.0 B1.2",
        "F1.1 B1.1",
    ]
    assert [stage.in_flight for stage in built.problem.stages] == [6, 6]


def test_a_stage_without_backward_only_runs_forwards() -> None:
    stages = (StageSpec(1, 1, 1, 1, (0,), 1, 0, False), StageSpec(1, 1, 1, 1, (1,), 1, 2))
    built = gpipe(PipelineProblem(stages, (EdgeSpec(0, 1),), 2, 2))
    assert list(built.schedule().lines) == ["F0.0 F0.1", "F1.0 F1.1 B1.0 B1.1"]


def test_two_stages_on_a_device_are_refused() -> None:
    stages = (StageSpec(1, 1, 1, 1, (0,), 1, 2), StageSpec(1, 1, 1, 1, (0,), 1, 2))
    with pytest.raises(ScheduleError, match="one stage a device"):
        gpipe(PipelineProblem(stages, (), 4, 1))
