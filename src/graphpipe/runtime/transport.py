"""What the executor asks of a network, and the in-process network.

The executor of a rank is a generator: it yields whenever what it waits for is not there.
A blocking transport (:mod:`graphpipe.runtime.process_group`) waits inside
:meth:`Handle.poll` and never lets it yield. The in-process transport answers at once, and
:func:`run_together` runs all ranks of a plan in one process by resuming them in turn: the
single-process staged executor that equality is tested against.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import Literal, Protocol, TypeVar

import torch

from graphpipe.errors import ScheduleError

ReduceOp = Literal["sum", "max", "min"]
Lane = Literal["control", "gradient"]
"""Collectives of one lane and group are issued in the same order by every member; lanes are
independent of one another."""
Wait = Generator[None, None, None]
"""A computation that yields while it has to wait."""
T = TypeVar("T")
Eventually = Generator[None, None, T]
"""A computation that yields while it has to wait, and then returns a value."""


class Handle(Protocol):
    """Something under way."""

    def poll(self) -> bool:
        """True once it is complete; a blocking transport waits here and returns True."""


class Transport(Protocol):
    """Messages and collectives between the ranks of a plan.

    Messages of an ordered pair of ranks are matched first in, first out; ``key`` names the
    message in checks and errors. A tensor given to :meth:`send` must stay unchanged, and one
    given to :meth:`receive` untouched, until its handle is complete.
    """

    world_size: int
    ranks: tuple[int, ...]
    """The ranks that this process runs."""

    def send(self, source: int, target: int, tensor: torch.Tensor, key: object) -> Handle: ...

    def receive(self, source: int, target: int, into: torch.Tensor, key: object) -> Handle: ...

    def all_reduce(
        self,
        rank: int,
        group: tuple[int, ...],
        tensor: torch.Tensor,
        op: ReduceOp = "sum",
        lane: Lane = "control",
    ) -> Handle:
        """Combines ``tensor`` in place over ``group``; every member calls it, in one order."""

    def broadcast(
        self, rank: int, group: tuple[int, ...], tensor: torch.Tensor, root: int
    ) -> Handle:
        """Overwrites ``tensor`` with that of rank ``root`` in every member of ``group``."""

    def close(self) -> None:
        """Gives back what the transport holds."""


def wait(handle: Handle) -> Wait:
    """Yields until ``handle`` is complete."""
    while not handle.poll():
        yield


def wait_all(handles: Iterable[Handle]) -> Wait:
    """Yields until all are complete."""
    for handle in handles:
        while not handle.poll():
            yield


class Done:
    """A handle of something that is complete already."""

    def poll(self) -> bool:
        return True


DONE = Done()


class _Message:
    def __init__(self, tensor: torch.Tensor, key: object) -> None:
        self.tensor = tensor
        self.key = key


class _Receipt:
    """A posted receive; messages are handed out in the order in which receives are posted."""

    def __init__(self, into: torch.Tensor, key: object) -> None:
        self.into = into
        self.key = key
        self.complete = False

    def poll(self) -> bool:
        return self.complete


class _Collective:
    """One collective of a group, under way until every member has joined."""

    def __init__(self, group: tuple[int, ...]) -> None:
        self.group = group
        self.tensors: dict[int, torch.Tensor] = {}

    def poll(self) -> bool:
        return len(self.tensors) == len(self.group)


class InProcess:
    """The transport of ranks that live in one process.

    It checks what a network cannot: that both ends of a channel name the same message in the
    same order, with the same shape and dtype.

    Raises:
        ScheduleError: where the two ends of a channel disagree.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.ranks = tuple(range(world_size))
        self._sent: dict[tuple[int, int], deque[_Message]] = {}
        self._posted: dict[tuple[int, int], deque[_Receipt]] = {}
        self._collectives: dict[tuple[Lane, tuple[int, ...], int], _Collective] = {}
        self._turn: dict[tuple[Lane, tuple[int, ...], int], int] = {}
        self.events = 0
        """Sends, receives and joins so far: what makes others go on."""

    def send(self, source: int, target: int, tensor: torch.Tensor, key: object) -> Handle:
        message = _Message(tensor, key)
        self._sent.setdefault((source, target), deque()).append(message)
        self._match(source, target)
        return DONE

    def receive(self, source: int, target: int, into: torch.Tensor, key: object) -> Handle:
        receipt = _Receipt(into, key)
        self._posted.setdefault((source, target), deque()).append(receipt)
        self._match(source, target)
        return receipt

    def _match(self, source: int, target: int) -> None:
        self.events += 1
        sent = self._sent.get((source, target))
        posted = self._posted.get((source, target))
        while sent and posted:
            message, receipt = sent.popleft(), posted.popleft()
            if message.key != receipt.key:
                raise ScheduleError(
                    "The two ends of a channel disagree on the order of messages",
                    where=f"channel from rank {source} to rank {target}",
                    expected=receipt.key,
                    got=message.key,
                )
            have = (tuple(message.tensor.shape), message.tensor.dtype)
            want = (tuple(receipt.into.shape), receipt.into.dtype)
            if have != want:
                raise ScheduleError(
                    "A message does not have the agreed shape and dtype",
                    where=f"{message.key}, from rank {source} to rank {target}",
                    expected=want,
                    got=have,
                )
            receipt.into.copy_(message.tensor)
            receipt.complete = True

    def all_reduce(
        self,
        rank: int,
        group: tuple[int, ...],
        tensor: torch.Tensor,
        op: ReduceOp = "sum",
        lane: Lane = "control",
    ) -> Handle:
        joint = self._join(rank, group, tensor, lane)
        if joint.poll():
            members = [joint.tensors[member] for member in group]
            total = combine(members, op)
            for member in members:
                member.copy_(total)
        return joint

    def broadcast(
        self, rank: int, group: tuple[int, ...], tensor: torch.Tensor, root: int
    ) -> Handle:
        joint = self._join(rank, group, tensor, "control")
        if joint.poll():
            for member in group:
                if member != root:
                    joint.tensors[member].copy_(joint.tensors[root])
        return joint

    def _join(
        self, rank: int, group: tuple[int, ...], tensor: torch.Tensor, lane: Lane
    ) -> _Collective:
        self.events += 1
        turn = self._turn.get((lane, group, rank), 0)
        self._turn[lane, group, rank] = turn + 1
        joint = self._collectives.setdefault((lane, group, turn), _Collective(group))
        joint.tensors[rank] = tensor.detach()
        if joint.poll():
            del self._collectives[lane, group, turn]
        return joint

    def close(self) -> None:
        self._sent.clear()
        self._posted.clear()
        self._collectives.clear()
        self._turn.clear()


def combine(members: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """The sum, maximum or minimum of tensors of one shape, element by element."""
    total = members[0].clone()
    for member in members[1:]:
        if op == "sum":
            total += member
        elif op == "max":
            torch.maximum(total, member, out=total)
        else:
            torch.minimum(total, member, out=total)
    return total


def run_together(
    transport: InProcess, programs: Sequence[Generator[None, None, object]]
) -> list[object]:
    """Runs the ranks' programs in one process, resuming each in turn; returns their results.

    The order is always the same, so a run is deterministic.

    Raises:
        ScheduleError: if no program can go on: the schedule deadlocks.
    """
    results: list[object] = [None] * len(programs)
    alive = list(range(len(programs)))
    try:
        while alive:
            # What a program waits for only completes by an event of another program. A round
            # without an event, in which none ended, means that all wait for one another.
            before = (transport.events, len(alive))
            for index in tuple(alive):
                try:
                    next(programs[index])
                except StopIteration as stop:
                    results[index] = stop.value
                    alive.remove(index)
            if (transport.events, len(alive)) == before:
                raise ScheduleError(
                    f"The schedule deadlocks: ranks {alive} wait for one another",
                    fix="Check the plan with graphpipe.plan.validate",
                )
    except BaseException:
        transport.close()  # what was under way must not meet the next run
        raise
    finally:
        for program in programs:
            program.close()
    return results
