"""Says which failure came first when one rank's failure makes others fail.

A rank that fails writes its message to the store that the processes met at; a rank that only
lost contact with another one reads it and repeats it, so that every process names the real
cause. A rank that does not move at all cannot say so itself: a watchdog thread ends it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from graphpipe.errors import StageFailedError

_KEY = "graphpipe/first_failure"
STALLED_EXIT_CODE = 75
"""Exit code of a process that its watchdog ended."""


def _prefix() -> str:
    """One board for each attempt of an elastic run."""
    return f"graphpipe/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


class PeerLostError(RuntimeError):
    """A transfer failed because another rank ended or stalled: never the first cause."""


def lost_contact(error: BaseException | None) -> bool:
    """Whether an error only says that another rank is gone or does not move: ours, or what a
    collective of the user's own raises over gloo."""
    if isinstance(error, PeerLostError):
        return True
    return isinstance(error, RuntimeError) and "gloo/transport" in str(error)


class FailureBoard:
    """Where the first failure of a run is written.

    Args:
        store: A store that all processes reach and that outlives them, or None: then each
            process knows its own failure only.
    """

    def __init__(self, store: Any | None) -> None:
        self._store = store

    @classmethod
    def connect(cls) -> FailureBoard:
        """The board in the launcher's store (torchrun's agent or ``graphpipe.launch``)."""
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not (address and port):
            return cls(None)
        try:
            store = TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=10))
        except (RuntimeError, ValueError):
            return cls(None)
        return cls.of(store)

    def report(self, message: str) -> None:
        """Writes ``message`` unless another failure is there already."""
        if self._store is None:
            return
        try:
            self._store.compare_set(_KEY, "", message)
        except RuntimeError:  # the store went away with the launcher: nobody reads it any more
            self._store = None

    @classmethod
    def of(cls, store: Any) -> FailureBoard:
        """The board that workers of a launcher with this store write to."""
        return cls(PrefixStore(_prefix(), store))

    def close(self) -> None:
        """Lets the store go."""
        self._store = None

    def peek(self) -> str | None:
        """The first failure if there is one by now."""
        if self._store is None or not self._store.check([_KEY]):
            return None
        return self.first()

    def first(self, patience: float = 3.0) -> str | None:
        """The first failure, waiting for it up to ``patience`` seconds; None if none came."""
        if self._store is None:
            return None
        try:
            self._store.wait([_KEY], timedelta(seconds=patience))
            message: bytes = self._store.get(_KEY)
            return message.decode()
        except RuntimeError:
            return None

    def explain(self, error: PeerLostError, rank: int) -> StageFailedError:
        """What to raise instead of ``error``: the first failure if it is known."""
        cause = self.first()
        if cause is None:
            return StageFailedError(
                f"Rank {rank} {error}",
                where=f"rank {rank}",
                fix="Look at the output of that rank: it ended, was killed, or does not move",
            )
        return StageFailedError(f"Rank {rank} stops because of an earlier failure: {cause}")


class Watchdog:
    """Ends the process when one piece of work takes longer than ``timeout`` seconds.

    The thread wakes a few times per ``timeout`` and costs nothing in between. Waiting for
    other ranks is not watched: the transport's own time-out covers it.

    Args:
        timeout: Seconds.
        board: Where the failure is written before the process ends.
    """

    def __init__(self, timeout: float, board: FailureBoard) -> None:
        self._timeout = timeout
        self._board = board
        self._work: tuple[float, Callable[[], str]] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="graphpipe-watchdog", daemon=True)
        self._thread.start()

    def begin(self, what: Callable[[], str]) -> None:
        """Something starts now; ``what`` says what if that is ever asked."""
        self._work = (time.monotonic(), what)

    def end(self) -> None:
        """The work ended."""
        self._work = None

    def close(self) -> None:
        """Stops the thread."""
        self._stop.set()
        self._thread.join(timeout=5)

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._timeout / 4)):
            work = self._work
            if work is not None and time.monotonic() - work[0] > self._timeout:
                message = f"{work[1]()} did not end within {self._timeout:g} s"
                self._board.report(message)
                print(f"error: {message}. The process ends.", file=sys.stderr, flush=True)
                os._exit(STALLED_EXIT_CODE)
