"""Timelines as records."""

from __future__ import annotations

import pytest

from graphpipe.errors import FileFormatError
from graphpipe.simulate.timeline import Event, Timeline


def timeline() -> Timeline:
    return Timeline(
        world_size=3,
        iteration_ns=100,
        events=(
            Event(rank=0, kind="F", start_ns=0, end_ns=30, stage=0, micro_batch=0),
            Event(rank=0, kind="optimizer", start_ns=90, end_ns=100),
            Event(rank=2, kind="B", start_ns=10, end_ns=30, stage=1, micro_batch=0),
        ),
    )


def test_busy_times_and_the_bubble_of_the_ranks_that_work() -> None:
    assert timeline().busy_ns == (40, 0, 20)
    assert timeline().bubble == pytest.approx(1 - 60 / 200)
    assert Timeline(world_size=2, iteration_ns=0).bubble == 0


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"iteration_ns": 100', '"iteration_ns": -1', "iteration_ns"),
        ('"kind": "B"', '"kind": "W"', "events.2.kind"),
        ('"start_ns": 10', '"start_ns": 1.5', "events.2.start_ns"),
        ('"network": "channel"', '"network": "carrier pigeon"', "network"),
    ],
)
def test_malformed_files_are_refused_by_field(old: str, new: str, field: str) -> None:
    text = timeline().to_json()
    assert Timeline.from_json(text) == timeline()
    assert old in text
    with pytest.raises(FileFormatError, match=f"field '{field}'"):
        Timeline.from_json(text.replace(old, new, 1))
