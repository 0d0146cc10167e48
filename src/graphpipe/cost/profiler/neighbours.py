"""Busy neighbours: the other cores of a host work while one is measured.

The cores of a host share caches and memory bandwidth (and often two of them are one core's
hardware threads), so what an op takes depends on whether the workers beside it compute too.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def _load(core: int | None, work: Callable[[], object]) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    while True:
        work()


@contextmanager
def busy_neighbours(count: int, work: Callable[[], object]) -> Iterator[None]:
    """While open, ``count`` processes repeat ``work``, each pinned to a core that is not ours.

    Args:
        count: Workers on this host beside the one that is measured.
        work: What they do. They are forked, so it need not be importable.
    """
    cores: list[int | None] = [None] * count
    if hasattr(os, "sched_getaffinity"):
        here = os.sched_getaffinity(0)
        others = [core for core in range(os.cpu_count() or 1) if core not in here]
        cores = [others[i % len(others)] if others else None for i in range(count)]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_load, args=(core, work), daemon=True) for core in cores]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
