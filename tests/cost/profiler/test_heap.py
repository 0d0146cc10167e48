"""Memory that stays mapped while ops are measured."""

from __future__ import annotations

import resource
import sys

import pytest
import torch

from graphpipe.cost.profiler import heap
from graphpipe.cost.profiler.heap import Heap, kept_heap

CPU = torch.device("cpu")
PAGES = 8 * 2**20 // 4096


def _faults() -> int:
    """Page faults while two megabytes are made four times."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.zeros(2**19) for _ in range(4)]
    after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert len(kept) == 4
    return after - before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page faults of Linux")
def test_warm_memory_has_no_faults() -> None:
    with kept_heap(CPU) as memory:
        memory.warm(64 * 2**20)
        # What other tests left in the heap may send a tensor or two elsewhere.
        assert _faults() < PAGES * 3 // 4


def test_memory_is_warmed_once_and_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "MOST_WARMED", 2**24)
    made: list[int] = []
    real = torch.empty

    def counted(size: int, **options: torch.dtype) -> torch.Tensor:
        made.append(size)
        return real(size, **options)

    monkeypatch.setattr(torch, "empty", counted)
    memory = Heap(CPU)
    memory.warm(100)
    memory.warm(100)
    assert made == [2**23]
    memory.warm(2**40)
    assert made == [2**23] * 3
    Heap(torch.device("cuda")).warm(2**20)
    assert len(made) == 3


def test_settings_are_set_and_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(heap, "_mallopt", lambda *pair: calls.append(pair))
    with kept_heap(torch.device("cuda")):
        pass
    assert calls == []
    with kept_heap(CPU):
        assert (heap.M_TRIM_THRESHOLD, 2**31 - 1) in calls
    assert calls[-1] == (heap.M_TRIM_THRESHOLD, 64 * 2**20)


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())
    heap._mallopt(heap.M_TRIM_THRESHOLD, 1)
