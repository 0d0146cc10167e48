"""Clocks and what they return."""

from __future__ import annotations

import time

import pytest
import torch

from graphpipe.cost.profiler.timing import Clock, Timing, is_out_of_memory


def test_timing_keeps_the_smallest_and_the_spread() -> None:
    assert Timing.of([3.0, 2.0, 4.0]) == Timing(2.0, 0.5)
    assert Timing.of([]) == Timing(0.0, 0.0)
    assert Timing.of([0.0, 0.0]) == Timing(0.0, 0.0)
    assert Timing(3.0, 0.5).less(1.0) == Timing(2.0, 0.5)
    assert Timing(3.0, 0.5).less(4.0).seconds == 0.0


def test_the_clock_of_a_cpu_returns_seconds_and_the_result() -> None:
    seconds, result = Clock(torch.device("cpu")).time(lambda: (time.sleep(0.02), 7)[1])
    assert result == 7
    assert seconds >= 0.02


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("[enforce fail] not enough memory: you tried to allocate"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_is_recognised(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
