"""The choice of a builder."""

from __future__ import annotations

import pytest

from graphpipe.plan.builders import build_schedule
from graphpipe.plan.problem import PipelineProblem, StageSpec


def problem(ranks: tuple[int, int]) -> PipelineProblem:
    return PipelineProblem(tuple(StageSpec(1, 1, 1, 1, (rank,), 1, 2) for rank in ranks), (), 4, 2)


def test_auto_is_kfkb_unless_a_device_hosts_two_stages() -> None:
    assert build_schedule(problem((0, 1))).builder == "kfkb"
    assert build_schedule(problem((1, 1))).builder == "list"


@pytest.mark.parametrize("name", ["kfkb", "list", "gpipe"])
def test_by_name(name: str) -> None:
    assert build_schedule(problem((0, 1)), name).builder == name


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="unknown builder 'best'"):
        build_schedule(problem((0, 1)), "best")
