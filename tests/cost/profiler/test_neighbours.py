"""Other cores that work while one is measured."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from graphpipe.cost.profiler import profile
from graphpipe.cost.profiler.measure import Budget
from graphpipe.cost.profiler.neighbours import busy_neighbours
from tests.cost.profiler.model import hard_graph


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_neighbours_work_on_other_cores_and_end(tmp_path: Path) -> None:
    def work() -> None:
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
        (tmp_path / str(os.getpid())).write_text(",".join(map(str, cores)), encoding="utf-8")
        time.sleep(0.005)

    with busy_neighbours(2, work):
        _until(lambda: len(list(tmp_path.iterdir())) == 2)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert os.getpid() not in pids
    assert not multiprocessing.active_children()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_neighbours_end_where_the_measurement_fails() -> None:
    with pytest.raises(RuntimeError, match="measured"), busy_neighbours(1, lambda: None):
        raise RuntimeError("measured")
    assert not multiprocessing.active_children()


def test_a_profile_beside_a_neighbour_is_complete() -> None:
    costs = profile(
        hard_graph(),
        micro_batches=[2],
        budget=Budget(0.0, 2, 2),
        correction_seconds=0,
        neighbours=1,
    )
    costs.check(hard_graph())
    assert costs.op_seconds("cpu-core", 2)[0].sum() > 0
    assert not multiprocessing.active_children()
