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


def test_two_rounds_are_merged_into_one_timing() -> None:
    merged = Timing(2.0, 0.5).merged(Timing(4.0, 0.25))
    assert merged.seconds == 2.0
    assert merged.spread == pytest.approx((3.0 + 5.0) / 2 / 2.0 - 1)
    assert Timing(0.0, 0.1).merged(Timing(1.0, 0.2)) == Timing(0.0, 0.2)


def test_the_clock_of_a_cpu_returns_seconds_and_the_result() -> None:
    seconds, result = Clock(torch.device("cpu")).time(lambda: (time.sleep(0.02), 7)[1])
    assert result == 7
    assert seconds >= 0.02


class FakeEvent:
    """A CUDA event that notes the number of kernels launched before it."""

    launched = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1

    def record(self) -> None:
        self.at = FakeEvent.launched

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds, as on a device: 2.5 for each kernel between the events."""
        return (end.at - self.at) * 2.5


def test_the_clock_of_a_gpu_lies_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append(str(device)))

    def kernels() -> str:
        order.append("call")
        FakeEvent.launched += 4
        return "result"

    seconds, result = Clock(torch.device("cuda", 1)).time(kernels)
    assert seconds == pytest.approx(0.010)
    assert result == "result"
    # Nothing older is timed, and the events have happened when they are read.
    assert order == ["cuda:1", "call", "cuda:1"]


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
