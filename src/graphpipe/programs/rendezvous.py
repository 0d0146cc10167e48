"""The store at which the agents of an elastic run meet, in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from graphpipe.errors import RuntimeSetupError


def serve(port: int, announce: Callable[[int], None], until: threading.Event | None = None) -> None:
    """Holds the store until the process is ended (or ``until`` is set).

    Args:
        port: TCP port; 0: any free one.
        announce: Told the port once agents may come.
        until: Ends it.

    Raises:
        RuntimeSetupError: if the port is taken.
    """
    try:
        store = TCPStore(
            "0.0.0.0", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
    except RuntimeError as error:
        raise RuntimeSetupError(
            f"Cannot open the store: {str(error).splitlines()[0]}",
            where=f"port {port}",
            fix="Choose another --port",
        ) from None
    announce(store.port)
    (until or threading.Event()).wait()
