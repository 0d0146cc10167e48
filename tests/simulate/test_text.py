"""Timelines as text."""

from __future__ import annotations

import pytest

from graphpipe.simulate.simulator import simulate
from graphpipe.simulate.text import render
from graphpipe.simulate.timeline import Event, Timeline
from tests.plan.plans import plan_of
from tests.plan.random_problems import random_problem
from tests.simulate.test_simulator import chain_plan


def test_rows_show_tasks_in_proportion() -> None:
    timeline = Timeline(
        world_size=2,
        iteration_ns=40,
        events=(
            Event(rank=0, kind="F", start_ns=0, end_ns=10, stage=0, micro_batch=0),
            Event(rank=0, kind="B", start_ns=20, end_ns=30, stage=0, micro_batch=0),
            Event(rank=0, kind="all_reduce", start_ns=30, end_ns=36),
            Event(rank=0, kind="optimizer", start_ns=36, end_ns=40),
            Event(rank=1, kind="F", start_ns=10, end_ns=20, stage=1, micro_batch=12),
        ),
        stage_names=("tower", "head"),
    )
    lines = render(timeline, 6 + 3 + 40 + 5).splitlines()
    assert lines[0] == "rank 0 |a0aaaaaaaa..........A0AAAAAAAA======****|  75%"
    assert lines[1] == "rank 1 |..........b12bbbbbbb....................|  25%"
    assert lines[2].split() == ["0", "40", "ns"]
    legend = " ".join(lines[3:])
    for item in ("a tower", "b head", "= all-reduce", "* optimizer", "50% of the ranks"):
        assert item in legend


@pytest.mark.parametrize("width", [20, 47, 80, 200])
def test_it_fits_the_width(width: int) -> None:
    for seed in range(10):
        text = render(simulate(plan_of(random_problem(seed))), width)
        assert max(len(line) for line in text.splitlines()) <= max(width, 30)


def test_print_uses_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert max(len(line) for line in str(simulate(chain_plan())).splitlines()) <= 60


def test_an_empty_timeline_is_idle() -> None:
    assert "rank 0 |....." in render(Timeline(world_size=1, iteration_ns=0), 40)
