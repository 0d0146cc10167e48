"""Clocks: how long does a call take on a CPU or a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

Result = TypeVar("Result")


class Timing(NamedTuple):
    """Several measurements of one thing.

    Attributes:
        seconds: The smallest: what it takes undisturbed.
        spread: (median - smallest) / smallest.
    """

    seconds: float
    spread: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """From single times, seconds; none: zero."""
        if not samples:
            return cls(0.0, 0.0)
        least = min(samples)
        return cls(least, (statistics.median(samples) - least) / least if least > 0 else 0.0)

    def merged(self, other: Timing) -> Timing:
        """Of two rounds of the same thing: the smallest of both, the mean of their medians."""
        least = min(self.seconds, other.seconds)
        if least <= 0:
            return Timing(least, max(self.spread, other.spread))
        medians = [item.seconds * (1 + item.spread) for item in (self, other)]
        return Timing(least, statistics.fmean(medians) / least - 1)

    def less(self, seconds: float) -> Timing:
        """With a constant part taken off, never below zero."""
        return Timing(max(0.0, self.seconds - seconds), self.spread)


class Clock:
    """Times calls on one device: a monotonic clock on a CPU, events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"

    def time(self, call: Callable[[], Result]) -> tuple[float, Result]:
        """Seconds of one call, and its result."""
        if not self._cuda:
            start = time.perf_counter()
            result = call()
            return time.perf_counter() - start, result
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        first.record()
        result = call()
        last.record()
        torch.cuda.synchronize(self.device)
        return first.elapsed_time(last) / 1e3, result


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory has run out, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "can't allocate memory" in text or "not enough memory" in text
    )
