"""A search without pauses for cyclic garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Switches the cyclic garbage collector off, and on again at the end if it was on.

    A search makes millions of small containers, none of them in a cycle: they go when their
    last reference goes. The collector would walk over the graph, its costs and all tasks
    for nothing, which was seen to take a third of a search.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
