"""Workers start, give results back, and never outlive a failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from graphpipe.errors import InputError, StageFailedError
from graphpipe.runtime.launch import launch


def _sum_of_ranks(offset: int) -> tuple[int, float]:
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return int(os.environ["RANK"]), float(value)


def _fail(how: str) -> None:
    rank = dist.get_rank()
    tensor = torch.zeros(4)
    if rank == 1:
        if how == "raise":
            raise ValueError("no such luck")
        if how == "ours":
            raise InputError("The input is wrong", where="x")
        if how == "exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(tensor)


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_results_come_back_in_rank_order(method: str) -> None:
    results = launch(_sum_of_ranks, 3, (10,), method=method, timeout=30)  # type: ignore[arg-type]
    assert results == [(0, 33.0), (1, 33.0), (2, 33.0)]


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("raise", StageFailedError, "Rank 1 failed: ValueError: no such luck"),
        ("ours", InputError, "The input is wrong"),
        ("exit", StageFailedError, "rank 1 ended with exit code 7"),
        ("kill", StageFailedError, "rank 1 was killed by SIGKILL"),
    ],
)
def test_the_first_real_failure_is_raised(how: str, kind: type[Exception], text: str) -> None:
    start = time.monotonic()
    with pytest.raises(kind, match=text):
        launch(_fail, 3, (how,), timeout=60)
    assert time.monotonic() - start < 30


def test_a_stopped_worker_ends_within_the_timeout_and_is_not_left_behind() -> None:
    before = set(psutil.pids())
    with pytest.raises(StageFailedError):
        launch(_fail, 2, ("stop",), timeout=3)
    left = [
        p
        for p in psutil.process_iter(["pid", "status"])
        if p.pid not in before and p.info["status"] == psutil.STATUS_STOPPED
    ]
    assert not left


class _Squares(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index * index


def _load() -> int:
    """Reads data through processes of the worker's own."""
    loader = torch.utils.data.DataLoader(_Squares(), batch_size=2, num_workers=2)
    return sum(int(batch.sum()) for batch in loader)


def test_a_worker_may_have_workers_of_its_own() -> None:
    assert launch(_load, 2, timeout=60, threads=1, method="fork") == [140, 140]


def _leave(path: str) -> None:
    """Ends without a word while a process that it started sleeps."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(path).write_text(str(child.pid))
    os._exit(3)


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    with pytest.raises(StageFailedError, match="exit code 3"):
        launch(_leave, 1, args=(str(noted),), timeout=60, threads=1, method="fork")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            gone = psutil.Process(int(noted.read_text())).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            gone = True
        if gone:
            return
        time.sleep(0.05)
    raise AssertionError("the process that the worker started is still there")
