"""When a search ends early: a time limit, or an interrupt by the user."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Patience:
    """How long a search may go on, and why it ended early.

    Args:
        time_limit: Seconds from now on; None for no limit.
    """

    def __init__(self, time_limit: float | None = None) -> None:
        self.time_limit = time_limit
        self.interrupted = False
        self._deadline = None if time_limit is None else time.monotonic() + time_limit

    def stop(self) -> bool:
        """Whether the search should return what it has."""
        if self.interrupted:
            return True
        return self._deadline is not None and time.monotonic() > self._deadline

    @contextmanager
    def guarded(self, anything: Callable[[], bool]) -> Iterator[None]:
        """Ends what runs inside at an interrupt (Ctrl-C), if there is anything to return.

        Without a result, and the second time, the interrupt is let through.
        """
        try:
            yield
        except KeyboardInterrupt:
            if self.interrupted or not anything():
                raise
            self.interrupted = True

    def note(self, stopped: bool, judged: int) -> list[str]:
        """The plan's remark about a search that ended early, if it did."""
        if self.interrupted:
            return [f"The search was interrupted after {judged} candidates: the best so far."]
        if stopped:
            return [
                f"The search was stopped at its time limit of {self.time_limit:g} s, after "
                f"{judged} candidates."
            ]
        return []
