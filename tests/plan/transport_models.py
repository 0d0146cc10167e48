"""Models of what back-ends guarantee, strict enough to hang where a back-end might.

``rendezvous`` is NCCL as documented: no tags, one stream a rank on which operations run one
after another in the order of their issue, each until its peer has come to the matching one.
With ``blocking`` the host waits for every operation that it issues. ``channels`` is gloo:
each ordered pair of ranks is a FIFO that progresses on its own, a send completes when
the receive is posted.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from graphpipe.plan.actions import Action, ActionLists
from graphpipe.plan.schedule import Task

Model = Literal["rendezvous", "blocking", "channels"]


class Stuck(AssertionError):
    """The ranks stand still with work left."""


def execute(lists: ActionLists, model: Model, rank_order: list[int]) -> list[tuple[int, Task]]:
    """Executes the lists; returns the tasks in the order of execution.

    Raises:
        Stuck: if nothing can go on.
        AssertionError: if a message is matched with another one.
    """
    table = lists.messages
    place = [0] * len(lists.lines)
    streams: list[deque[tuple[str, int]]] = [deque() for _ in lists.lines]
    channels: dict[tuple[int, int, str], deque[int]] = {}
    done: set[tuple[str, int]] = set()
    ran: list[tuple[int, Task]] = []

    def progress() -> bool:
        moved = False
        if model == "channels":
            for (source, target, side), queue in channels.items():
                other = channels.get((source, target, "recv"))
                while side == "send" and queue and other:
                    sent, received = queue.popleft(), other.popleft()
                    assert sent == received, "a channel delivers another message"
                    done.update({("send", sent), ("recv", sent)})
                    moved = True
            return moved
        again = True
        while again:
            again = False
            for rank, stream in enumerate(streams):
                if not stream or stream[0][0] != "send":
                    continue
                number = stream[0][1]
                peer = streams[table[number].target]
                if peer and peer[0][0] == "recv" and table[peer[0][1]].source == rank:
                    assert peer[0][1] == number, "without tags another message is matched"
                    stream.popleft()
                    peer.popleft()
                    done.update({("send", number), ("recv", number)})
                    again = moved = True
        return moved

    def step(rank: int, action: Action) -> bool:
        """Whether the host gets past the action."""
        kind, number = action.kind, action.message
        if kind == "run":
            ran.append((rank, action.task))
            return True
        if kind in ("wait_recv", "wait_send"):
            return (kind[5:], number) in done
        if model == "channels":
            message = table[number]
            channels.setdefault((message.source, message.target, kind), deque()).append(number)
            return True
        if model == "blocking":
            if (kind, number) in done:
                return True
            if not streams[rank]:
                streams[rank].append((kind, number))
            return False
        streams[rank].append((kind, number))
        return True

    while True:
        moved = False
        for rank in rank_order:
            line = lists.lines[rank]
            while place[rank] < len(line) and step(rank, line[place[rank]]):
                place[rank] += 1
                moved = True
        if all(at == len(line) for at, line in zip(place, lists.lines, strict=True)):
            progress()
            missing = 2 * len(table) - len(done)
            assert not missing, f"{missing} operations never completed"
            return ran
        if not progress() and not moved:
            raise Stuck(str([line[at] for at, line in zip(place, lists.lines, strict=True)
                             if at < len(line)]))  # fmt: skip
