"""Memory as it is in the middle of a training run: mapped already, but in no cache.

A process that asks for memory the first time gets it page by page, each with a fault that
costs about as much as writing the page. A training loop asks for the same memory again in
every step, and the C library hands out what was freed before, so after a few steps there are
no faults. Single ops that are measured in a process of their own would have them in every
repeat: a linear looks up to a third dearer. So the profiler maps what it needs beforehand,
and tells glibc to keep it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``, see mallopt(3)."""
LARGEST_KEPT = 32 * 2**20
"""Bytes: glibc's DEFAULT_MMAP_THRESHOLD_MAX. Larger blocks are mapped anew every time, in
training as well."""
MOST_WARMED = 512 * 2**20
_BLOCK = 8 * 2**20


def _mallopt(parameter: int, value: int) -> None:
    """Sets a parameter of the C library's allocator; does nothing where there is none."""
    try:
        ctypes.CDLL(None).mallopt(parameter, value)
    except (AttributeError, OSError, TypeError):
        return  # not glibc


def keep_memory() -> None:
    """From now on this process keeps freed memory mapped, as a GPU's caching allocator does.

    Otherwise glibc gives the end of its heap back whenever enough of it is free, and a training
    loop pays for the faults of getting it again in every step.
    """
    _mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
    _mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def kept_heap(device: torch.device) -> Iterator[Heap]:
    """While open, freed memory of the CPU stays mapped; what is free then goes back."""
    if device.type != "cpu":
        yield Heap(device)
        return
    keep_memory()
    try:
        yield Heap(device)
    finally:
        # Where glibc's own adaption of these two ends; setting them has switched it off.
        _mallopt(M_TRIM_THRESHOLD, 2 * LARGEST_KEPT)


def _free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Heap:
    """Free memory of this process.

    Args:
        device: Whose; a GPU has a caching allocator of its own that keeps memory anyhow.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._warm = 0

    def warm(self, nbytes: int) -> None:
        """Sees to it that about so many bytes are mapped and free."""
        wanted = min(nbytes, MOST_WARMED, _free_bytes() // 4)
        if self._device.type != "cpu" or wanted <= self._warm:
            return
        blocks = [
            torch.empty(_BLOCK, dtype=torch.uint8).fill_(0) for _ in range(-(-wanted // _BLOCK))
        ]
        self._warm = len(blocks) * _BLOCK
        del blocks
