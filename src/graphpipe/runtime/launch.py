"""Starts the workers of a plan on this machine, and makes sure that none is left behind.

``torchrun`` remains the usual way to start on one or several machines; a worker function
runs unchanged under both. Workers are started by a forkserver that has torch loaded (or by
fork, for functions that cannot be pickled): 16 ranks start in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from graphpipe.errors import GraphPipeError, StageFailedError
from graphpipe.runtime.failures import STALLED_EXIT_CODE, FailureBoard, lost_contact

_GRACE_SECONDS = 3.0
"""How long to wait for the real cause after a rank only lost contact with another one."""
_TERM_SECONDS = 2.0
"""Between asking a worker to end and killing it."""


@dataclass
class _Failure:
    """How a worker ended badly. ``cause`` is False where it only lost contact."""

    rank: int
    cause: bool
    error: Exception


def launch(
    function: Callable[..., Any],
    world_size: int,
    args: Sequence[Any] = (),
    *,
    timeout: float = 1800.0,
    threads: int | None = None,
    method: Literal["forkserver", "fork"] = "forkserver",
) -> list[Any]:
    """Runs ``function(*args)`` in ``world_size`` processes over gloo; returns their results.

    Each worker finds its rank in ``torch.distributed`` (initialised) and in the environment
    variables that torchrun sets. When one fails, the others are ended, and the first real
    failure is raised.

    Args:
        function: What each worker runs; its result must be picklable. With ``forkserver`` it
            must be importable by name.
        world_size: Number of workers.
        args: Arguments of every worker.
        timeout: Seconds after which a transfer without progress fails.
        threads: Compute threads of each worker; default: the cores shared out, at least 1.
        method: How processes are started.

    Raises:
        StageFailedError: if a worker failed; names its rank and what happened.
        GraphPipeError: an error of ours that a worker raised, as it is.
    """
    count = threads or max(1, (os.cpu_count() or 1) // world_size)
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["graphpipe.runtime.preload"])
    store: Any = None
    board: FailureBoard | None = None
    workers: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_work,
                args=(rank, world_size, timeout, count, theirs, function, tuple(args)),
                name=f"graphpipe-rank-{rank}",
                daemon=False,  # a worker may have children of its own, such as data loaders'
            )
            process.start()
            theirs.close()
            workers.append(process)
            pipes.append(mine)
        # The store lives in this process, so it outlives every worker; and it is made after the
        # forks, because its thread may hold a lock of the C library at any moment, which a
        # process forked just then could never take.
        limit = timedelta(seconds=timeout)
        store = TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
        board = FailureBoard.of(store)
        for pipe in pipes:
            with contextlib.suppress(OSError):  # it has ended already; _collect says how
                pipe.send_bytes(str(store.port).encode())
        return _collect(workers, pipes, board)
    finally:
        _end(workers)
        for pipe in pipes:
            pipe.close()
        # The traceback of an error keeps this frame; the store must not live as long.
        if board is not None:
            board.close()
        store = None


def _work(
    rank: int,
    world_size: int,
    timeout: float,
    threads: int,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """The life of a worker; its last message is ("result", value) or ("error", ...)."""
    # What a fork inherited must never be destroyed here: a store of the launcher's, say, would
    # wait in its destructor for a thread that this process does not have.
    gc.freeze()
    os.setpgid(0, 0)  # so that the launcher can end what this worker started, too
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when to end
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    port = int(pipe.recv_bytes())
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True", OMP_NUM_THREADS=str(threads),
    )  # fmt: skip
    torch.set_num_threads(threads)
    code = 0
    try:
        limit = timedelta(seconds=timeout)
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
        )
        result = function(*args)
        message = pickle.dumps(("result", result))
    except BaseException as error:
        code = 1
        message = _describe(rank, error)
    with contextlib.suppress(OSError):
        pipe.send_bytes(message)
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0:
        dist.destroy_process_group()
    # Not sys.exit: threads of a broken process group may wait for ever at interpreter exit.
    os._exit(code)


def _end_with_launcher() -> None:
    """Ends the worker when the launcher is gone, however it went."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    wait([launcher.sentinel])
    os._exit(1)


def _describe(rank: int, error: BaseException) -> bytes:
    cause = not (lost_contact(error) or lost_contact(error.__cause__))
    if isinstance(error, GraphPipeError):
        shown: Exception = error
    else:
        text = "".join(traceback.format_exception(error))
        shown = StageFailedError(
            f"Rank {rank} failed: {type(error).__name__}: {error}", where=f"rank {rank}"
        )
        shown.add_note(text)
    if cause:
        FailureBoard.connect().report(str(shown))
    notes = getattr(shown, "__notes__", [])
    return pickle.dumps(("error", cause, shown, notes))


def _collect(
    workers: Sequence[BaseProcess], pipes: Sequence[Connection], board: FailureBoard
) -> list[Any]:
    """Waits for all results, or for the first real failure."""
    results: list[Any] = [None] * len(workers)
    open_ranks = set(range(len(workers)))
    lost: _Failure | None = None
    deadline: float | None = None
    while open_ranks:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([pipes[rank] for rank in open_ranks], left)
        if not ready:
            break
        for rank in sorted(open_ranks):
            if pipes[rank] not in ready:
                continue
            open_ranks.discard(rank)
            outcome = _outcome(rank, workers[rank], pipes[rank], board)
            if not isinstance(outcome, _Failure):
                results[rank] = outcome
                continue
            if outcome.cause:
                raise outcome.error
            if lost is None:
                lost = outcome
                deadline = time.monotonic() + _GRACE_SECONDS
    if lost is not None:
        raise lost.error
    return results


def _outcome(rank: int, worker: BaseProcess, pipe: Connection, board: FailureBoard) -> Any:
    """A worker's result, or its :class:`_Failure`."""
    try:
        message = pickle.loads(pipe.recv_bytes())
    except EOFError:
        worker.join(_TERM_SECONDS)
        code = worker.exitcode
        said = board.peek()
        if code == STALLED_EXIT_CODE and said is not None:
            return _Failure(rank, True, StageFailedError(said))
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code} and without a word"
        error = StageFailedError(
            f"The worker of rank {rank} {how}",
            where=f"rank {rank}",
            fix="If the machine ran out of memory, use a smaller micro-batch or recomputation",
        )
        return _Failure(rank, True, error)
    if message[0] == "result":
        return message[1]
    _, cause, error, notes = message
    for note in notes:
        error.add_note(note)
    return _Failure(rank, cause, error)


def _end(workers: Sequence[BaseProcess]) -> None:
    """Ends what still runs: asks, then kills, then reaps."""
    for worker in workers:
        if worker.is_alive():
            worker.terminate()
    deadline = time.monotonic() + _TERM_SECONDS
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        if worker.is_alive():
            worker.kill()
        group = worker.pid
        worker.join()
        worker.close()
        if group is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
