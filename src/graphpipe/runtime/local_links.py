"""Messages between ranks on one machine, over sockets of the operating system.

Gloo sends every message over TCP with a hand-shake of its own, through a thread at each end:
on a small machine that is most of what a short message costs. Ranks that share a machine hand
short CPU tensors to one another directly instead: one system call at each end, no thread, no
hand-shake. What decides the way of a message is its size, which both ends know, so each way
keeps its own order.

A send never waits. What the socket does not take at once is written by a thread, which exists
only then, so nobody's progress depends on when its peer sends. A message is read when it is
waited for. Each carries its size and its number, which are compared with what is expected.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from graphpipe.errors import RuntimeSetupError, ScheduleError
from graphpipe.runtime.failures import PeerLostError
from graphpipe.runtime.randomness import op_key
from graphpipe.runtime.transport import DONE, Handle, ReduceOp, combine

SHORT_BYTES = 160 * 1024
"""Largest message that goes this way: about what a socket holds, so that a sender seldom needs
its thread. Longer ones go over gloo, whose threads move them while both ends compute."""
FEW_RANKS = 8
SMALL_BYTES = 4096
"""Up to so many ranks and bytes everyone tells everyone; beyond, gloo's algorithms are better."""
_HEADER = struct.Struct("<qq")
_HELLO = struct.Struct("<q32s")
_CREDENTIALS = struct.Struct("iII")
_BUFFER_BYTES = 4 * 2**20
_DONTWAIT = getattr(socket, "MSG_DONTWAIT", 0)


class Receipt:
    """A posted receive."""

    __slots__ = ("_link", "done", "into", "key")

    def __init__(self, link: Link, into: torch.Tensor, key: object) -> None:
        self._link = link
        self.into = into
        self.key = key
        self.done = False

    def poll(self) -> bool:
        if not self.done:
            self._link.read_until(self)
        return True


class Link:
    """The connection to one peer.

    Args:
        peer: Its rank.
        connection: A connected stream socket.
        timeout: Seconds without progress after which the peer counts as lost.
    """

    def __init__(self, peer: int, connection: socket.socket, timeout: float) -> None:
        self._peer = peer
        self._socket = connection
        self._header = bytearray(_HEADER.size)
        self._posted: deque[Receipt] = deque()
        self._lock = threading.Lock()
        self._backlog: deque[tuple[memoryview, torch.Tensor]] = deque()
        self._error: OSError | None = None
        limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6) or 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, limit)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    def send(self, tensor: torch.Tensor, key: object) -> Handle:
        """Hands over a contiguous tensor; it must stay unchanged until it is received."""
        content = _bytes_of(tensor)
        header = _HEADER.pack(len(content), _number(key))
        with self._lock:
            if self._error is not None:
                raise self._lost(key, self._error)
            waiting = bool(self._backlog)
            sent = 0
            if not waiting:
                try:
                    sent = self._socket.sendmsg((header, content), (), _DONTWAIT)
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise self._lost(key, error) from error
            if sent < len(header):
                self._backlog.append((memoryview(header)[sent:], tensor))
                sent = len(header)
            if sent - len(header) < len(content):
                self._backlog.append((content[sent - len(header) :], tensor))
            if self._backlog and not waiting:
                threading.Thread(target=self._flush, daemon=True).start()
        return DONE

    def _flush(self) -> None:
        """Writes what is left, in order; ends when nothing is."""
        while True:
            content, _ = self._backlog[0]  # only this thread takes any away
            try:
                self._socket.sendall(content)
            except OSError as error:
                with self._lock:
                    self._error = error
                return
            with self._lock:
                self._backlog.popleft()
                # In the same breath: whoever finds the backlog empty starts another thread.
                if not self._backlog:
                    return

    def receive(self, into: torch.Tensor, key: object) -> Handle:
        """Posts a receive; messages are handed out in the order of the posts."""
        receipt = Receipt(self, into, key)
        self._posted.append(receipt)
        return receipt

    def read_until(self, receipt: Receipt) -> None:
        """Reads messages up to that of ``receipt``.

        Raises:
            PeerLostError: if the peer is gone, or sends nothing for too long.
            ScheduleError: if it sent another message than the one that is expected.
        """
        while not receipt.done:
            first = self._posted[0]
            try:
                self._read(first)
            except OSError as error:
                raise self._lost(first.key, error) from error
            self._posted.popleft()
            first.done = True

    def _read(self, receipt: Receipt) -> None:
        header, content = self._header, _bytes_of(receipt.into)
        size = len(header)
        got = self._more(self._socket.recvmsg_into((header, content))[0])
        while got < size:
            got += self._more(self._socket.recv_into(memoryview(header)[got:]))
        found, wanted = _HEADER.unpack(header), (len(content), _number(receipt.key))
        if found != wanted:
            raise ScheduleError(
                "The two ends of a channel disagree on a message",
                where=f"message {receipt.key} from rank {self._peer}",
                expected="{} bytes, number {}".format(*wanted),
                got="{} bytes, number {}".format(*found),
            )
        got -= size
        while got < len(content):
            got += self._more(self._socket.recv_into(content[got:]))

    @staticmethod
    def _more(count: int) -> int:
        if count == 0:
            raise ConnectionResetError("the connection was closed")
        return count

    def _lost(self, key: object, error: OSError) -> PeerLostError:
        what = "nothing came in time" if isinstance(error, BlockingIOError) else str(error)
        return PeerLostError(
            f"lost contact with rank {self._peer} while waiting for message {key}: {what}"
        )

    def close(self) -> None:
        """Closes the connection once everything is written (or the peer is gone)."""
        while self._backlog and self._error is None:
            time.sleep(0.001)
        self._socket.close()


class LocalLinks:
    """The links of one rank.

    Args:
        links: By rank of the peer.
    """

    def __init__(self, links: dict[int, Link]) -> None:
        self._links = links

    def get(self, peer: int, tensor: torch.Tensor) -> Link | None:
        """The link by which a tensor goes to (or comes from) ``peer``; None: over gloo."""
        link = self._links.get(peer)
        return link if link is not None and tensor.nbytes <= SHORT_BYTES else None

    def reduces(self, world_size: int, tensor: torch.Tensor) -> bool:
        """Whether :meth:`all_reduce` is the way for a tensor: few ranks, all of them here."""
        few = len(self._links) == world_size - 1 and world_size <= FEW_RANKS
        return few and tensor.nbytes <= SMALL_BYTES and not tensor.is_cuda

    def all_reduce(self, rank: int, tensor: torch.Tensor, op: ReduceOp, key: int) -> Handle:
        """Combines ``tensor`` in place over all ranks: everyone tells everyone.

        The values are combined in the order of the ranks, so all ranks get the same bits.
        Collectives have links of their own, and every rank starts them in the same order.
        """
        values = {rank: tensor.clone()}
        handles: list[Handle] = []
        for peer, link in self._links.items():
            link.send(values[rank], key)
            values[peer] = torch.empty_like(values[rank])
            handles.append(link.receive(values[peer], key))
        return _Reduction(handles, values, tensor, op)

    def close(self) -> None:
        """Closes all connections."""
        for link in self._links.values():
            link.close()
        self._links.clear()


class _Reduction:
    """An all-reduce under way."""

    __slots__ = ("_handles", "_into", "_op", "_values")

    def __init__(
        self,
        handles: list[Handle],
        values: dict[int, torch.Tensor],
        into: torch.Tensor,
        op: ReduceOp,
    ) -> None:
        self._handles = handles
        self._values = values
        self._into: torch.Tensor | None = into
        self._op: ReduceOp = op

    def poll(self) -> bool:
        if self._into is not None:
            for handle in self._handles:
                handle.poll()
            self._into.copy_(combine([self._values[r] for r in sorted(self._values)], self._op))
            self._into = None
        return True


def connect(rank: int, world_size: int, group: Any, timeout: float) -> LocalLinks:
    """Connects this rank to those on the same machine; a collective operation of ``group``.

    Raises:
        RuntimeSetupError: if a rank on this machine does not answer.
    """
    token = secrets.token_hex(16)
    machine = _machine()
    listener: socket.socket | None = None
    if machine is not None:
        try:
            listener = _listen(f"\0graphpipe-{token}", world_size, timeout)
        except OSError:
            machine = None  # the others must not wait: they reach this rank over gloo
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, (machine, token), group=group)
    if listener is None:
        return LocalLinks({})
    here = [r for r, (where, _) in enumerate(everyone) if where == machine and r != rank]
    found: dict[int, socket.socket] = {}
    try:
        for peer in here:
            if peer < rank:
                made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                made.connect(f"\0graphpipe-{everyone[peer][1]}")
                made.sendall(_HELLO.pack(rank, token.encode()))
                found[peer] = made
        while len(found) < len(here):
            made, _ = listener.accept()
            if not _own(made):
                made.close()
                continue
            made.settimeout(timeout)
            hello = made.recv(_HELLO.size, socket.MSG_WAITALL)
            peer, said = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (-1, b"")
            # Of the user's processes, only a rank of this run says the token it was told.
            if peer not in here or peer in found or said != everyone[peer][1].encode():
                made.close()
                continue
            made.settimeout(None)
            found[peer] = made
    except OSError as error:
        raise RuntimeSetupError(
            f"A rank on this machine cannot be reached: {error}",
            where=f"rank {rank}",
            expected=f"connections with ranks {here}",
            got=f"connections with ranks {sorted(found)}",
        ) from error
    finally:
        listener.close()
    return LocalLinks({peer: Link(peer, made, timeout) for peer, made in found.items()})


def _listen(name: str, backlog: int, timeout: float) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(name)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    listener.settimeout(timeout)
    return listener


def _own(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end.

    The names of such sockets, and so the tokens in them, can be read by every user of the
    machine.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return bool(user == os.getuid())


def _machine() -> str | None:
    """Names the machine, namespaces and user; None where such sockets do not exist."""
    if sys.platform != "linux":
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "user")]
        return f"{boot}/{spaces}/{os.getuid()}"
    except OSError:
        return None


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; the caller keeps the tensor."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _number(key: object) -> int:
    return key if isinstance(key, int) else op_key(str(key)) >> 1
