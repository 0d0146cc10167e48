"""Messages over the sockets of one machine: in order, of any number, and refused when wrong."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from graphpipe.errors import ScheduleError
from graphpipe.runtime.failures import PeerLostError
from graphpipe.runtime.launch import launch
from graphpipe.runtime.local_links import SHORT_BYTES, Link, _own, connect
from graphpipe.runtime.process_group import ProcessGroupTransport


def _pair(timeout: float = 30.0) -> tuple[Link, Link]:
    one, two = socket.socketpair()
    return Link(1, one, timeout), Link(0, two, timeout)


def test_messages_arrive_as_they_were_whatever_their_type() -> None:
    here, there = _pair()
    sent = [
        torch.arange(12.0).view(3, 4),
        torch.tensor(7, dtype=torch.int64),
        torch.randn(5).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
    ]
    for number, tensor in enumerate(sent):
        here.send(tensor, number)
    into = [torch.empty_like(tensor) for tensor in sent]
    handles = [there.receive(tensor, number) for number, tensor in enumerate(into)]
    # Waited for in another order than sent: what comes before is read on the way.
    for handle in reversed(handles):
        assert handle.poll()
    assert all(torch.equal(got, want) for got, want in zip(into, sent, strict=True))


def test_a_sender_never_waits_for_a_receiver_that_is_behind() -> None:
    here, there = _pair()
    count, rows = 400, SHORT_BYTES // 4
    for number in range(count):  # 60 MB: far more than a socket holds
        here.send(torch.full((rows,), float(number)), number)
    for number in range(count):
        into = torch.empty(rows)
        assert there.receive(into, number).poll()
        assert into[0] == into[-1] == number
    here.send(torch.ones(3), count)
    into = torch.zeros(3)
    assert there.receive(into, count).poll()
    assert into.sum() == 3
    here.close()
    there.close()


class _Pausing:
    """A lock that keeps a thread which has written everything from going on."""

    def __init__(self, link: Link) -> None:
        self.emptied, self.resume = threading.Event(), threading.Event()
        self._link, self._lock, self._main = link, link._lock, threading.current_thread()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *args: object) -> None:
        empty = not self._link._backlog
        self._lock.release()
        if empty and threading.current_thread() is not self._main and not self.emptied.is_set():
            self.emptied.set()
            self.resume.wait(30)


def test_only_one_thread_writes_however_long_the_last_one_takes_to_end() -> None:
    here, there = _pair()
    for link in (here, there):
        link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    lock = _Pausing(here)
    here._lock = lock  # type: ignore[assignment]
    into = torch.empty(SHORT_BYTES // 4)
    for number in range(3):
        here.send(torch.full_like(into, float(number)), number)
        if number == 1:
            lock.resume.set()
            time.sleep(0.05)  # were the first thread to go on writing, it would now
        assert there.receive(into, number).poll()
        assert bool((into == number).all())
        assert lock.emptied.wait(30)
    here.close()
    there.close()


def test_only_processes_of_this_user_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = socket.socketpair()
    with one, two:
        assert _own(one)
        monkeypatch.setattr("os.getuid", lambda: 123456)
        assert not _own(one)


@pytest.mark.parametrize(
    ("wanted", "key"), [(torch.empty(3), 0), (torch.empty(5), 0), (torch.empty(4), 1)]
)
def test_another_message_than_expected_is_refused(wanted: torch.Tensor, key: int) -> None:
    here, there = _pair()
    here.send(torch.zeros(4), 0)
    with pytest.raises(ScheduleError, match="disagree on a message"):
        there.receive(wanted, key).poll()


def test_a_peer_that_is_gone_or_silent_is_lost() -> None:
    here, there = _pair(timeout=0.2)
    with pytest.raises(PeerLostError, match=r"rank 0 .* nothing came in time"):
        there.receive(torch.empty(4), 3).poll()
    here.close()
    # It is the first message that is missing, whichever is waited for.
    with pytest.raises(PeerLostError, match="rank 0 while waiting for message 3"):
        there.receive(torch.empty(4), 4).poll()
    with pytest.raises(PeerLostError, match="rank 0"):
        there.send(torch.empty(4), 5)


def test_a_receive_that_is_waited_for_sees_a_late_message() -> None:
    here, there = _pair()
    into = torch.zeros(4)
    handle = there.receive(into, 0)

    def later() -> None:
        time.sleep(0.05)
        here.send(torch.ones(4), 0)

    thread = threading.Thread(target=later)
    thread.start()
    assert handle.poll()
    thread.join()
    assert into.sum() == 4


def _exchange() -> tuple[int, bool]:
    """Every rank sends to every other; short and long messages mixed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    transport = ProcessGroupTransport(timeout=60.0)
    sizes = [4, SHORT_BYTES // 4 + 1, 9]  # the middle one goes over gloo
    peers = [peer for peer in range(world) if peer != rank]
    tensors = {
        (peer, i): torch.full((size,), float(10 * rank + i))
        for peer in peers
        for i, size in enumerate(sizes)
    }
    sends = [
        transport.send(rank, peer, tensors[peer, i], i) for peer in peers for i in range(len(sizes))
    ]
    right = True
    for peer in peers:
        into = [torch.empty(size) for size in sizes]
        handles = [transport.receive(peer, rank, value, i) for i, value in enumerate(into)]
        for handle in handles:
            handle.poll()
        right &= all(bool((value == 10 * peer + i).all()) for i, value in enumerate(into))
    for handle in sends:
        handle.poll()
    linked = sum(transport._links.get(peer, torch.empty(1)) is not None for peer in peers)
    dist.barrier()
    transport.close()
    return linked, right


def test_ranks_of_one_machine_are_all_connected() -> None:
    assert launch(_exchange, 3, timeout=60, threads=1, method="fork") == [(2, True)] * 3


def _reduce() -> list[list[float]]:
    rank = dist.get_rank()
    transport = ProcessGroupTransport(timeout=60.0)
    everyone = tuple(range(dist.get_world_size()))
    values = [torch.tensor([0.1 * (rank + 1), -float(rank)], dtype=torch.float64) for _ in range(3)]
    handles = [
        transport.all_reduce(rank, everyone, value, op)
        for value, op in zip(values, ("sum", "max", "min"), strict=True)
    ]
    for handle in reversed(handles):
        handle.poll()
    linked = transport._joint.reduces(len(everyone), values[0])
    dist.barrier()
    transport.close()
    assert linked
    return [value.tolist() for value in values]


def test_small_reductions_give_every_rank_the_same_bits() -> None:
    found = launch(_reduce, 3, timeout=60, threads=1, method="fork")
    assert found[0] == found[1] == found[2]
    assert found[0] == [[0.1 + 0.2 + 0.1 * 3, -3.0], [0.1 * 3, 0.0], [0.1, -2.0]]


def _alone() -> bool:
    """Ranks that are not on one machine have no link, and nothing is missing."""
    import graphpipe.runtime.local_links as module

    module._machine = lambda: f"machine {dist.get_rank()}"  # type: ignore[assignment]
    links = connect(dist.get_rank(), dist.get_world_size(), None, 30.0)
    return all(links.get(peer, torch.empty(1)) is None for peer in range(2))


def test_ranks_of_other_machines_are_reached_over_gloo() -> None:
    assert launch(_alone, 2, timeout=60, threads=1, method="fork") == [True, True]
