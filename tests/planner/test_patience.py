"""A search that ends early keeps the best plan so far and says so."""

from __future__ import annotations

import pytest

from graphpipe.plan.validate import validate
from graphpipe.planner.patience import Patience
from graphpipe.planner.search import plan
from tests.planner.synthetic import cluster_of, towers


def test_an_interrupt_keeps_the_best_plan() -> None:
    file = towers(4, 6, 3)
    told = []

    def interrupt_once_there_is_a_plan(judged: int, seconds: float) -> None:
        told.append(judged)
        if seconds < float("inf") and len(told) < 10**6:
            told.extend([0] * 10**6)
            raise KeyboardInterrupt

    found = plan(
        file.graph, file.costs, cluster_of(8), batch_size=64,
        progress=interrupt_once_there_is_a_plan,
    )  # fmt: skip
    validate(found, file.graph)
    assert any("interrupted" in note for note in found.notes)


def test_an_interrupt_before_any_plan_is_let_through() -> None:
    file = towers(4, 6, 3)

    def interrupt(judged: int, seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan(file.graph, file.costs, cluster_of(8), batch_size=64, progress=interrupt)


def test_the_second_interrupt_is_let_through() -> None:
    patience = Patience()
    with patience.guarded(lambda: True):
        raise KeyboardInterrupt
    assert patience.stop()
    with pytest.raises(KeyboardInterrupt), patience.guarded(lambda: True):
        raise KeyboardInterrupt


def test_a_time_limit_stops() -> None:
    assert Patience(-1.0).stop()
    assert not Patience(1e9).stop()
    assert not Patience().stop()
    assert Patience().note(False, 5) == []
    assert "time limit of 3 s" in Patience(3.0).note(True, 5)[0]
