"""The in-process network: order, agreement, collectives, deadlocks."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch

from graphpipe.errors import ScheduleError
from graphpipe.runtime.transport import InProcess, run_together, wait, wait_all


def test_messages_of_a_pair_arrive_in_order_whichever_end_comes_first() -> None:
    network = InProcess(2)
    first, second = torch.zeros(2), torch.zeros(3)
    early = network.receive(0, 1, first, "a")
    assert not early.poll()
    network.send(0, 1, torch.tensor([1.0, 2.0]), "a")
    assert early.poll()
    network.send(0, 1, torch.tensor([3.0, 4.0, 5.0]), "b")
    assert network.receive(0, 1, second, "b").poll()
    assert first.tolist() == [1, 2]
    assert second.tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("sent", "key", "text"),
    [
        (torch.zeros(2), "other", "disagree on the order"),
        (torch.zeros(3), "a", "shape and dtype"),
        (torch.zeros(2, dtype=torch.float64), "a", "shape and dtype"),
    ],
)
def test_what_the_two_ends_do_not_agree_on_is_refused(
    sent: torch.Tensor, key: str, text: str
) -> None:
    network = InProcess(2)
    network.send(0, 1, sent, key)
    with pytest.raises(ScheduleError, match=text):
        network.receive(0, 1, torch.zeros(2), "a")


@pytest.mark.parametrize(("op", "expected"), [("sum", 6.0), ("max", 3.0), ("min", 1.0)])
def test_all_reduce_gives_every_member_the_same(op: str, expected: float) -> None:
    network = InProcess(3)
    values = [torch.tensor([float(rank + 1)]) for rank in range(3)]

    def program(rank: int) -> Generator[None, None, float]:
        yield from wait(network.all_reduce(rank, (0, 1, 2), values[rank], op))  # type: ignore[arg-type]
        return float(values[rank])

    assert run_together(network, [program(rank) for rank in range(3)]) == [expected] * 3


def test_lanes_and_groups_do_not_mix() -> None:
    network = InProcess(2)

    def program(rank: int) -> Generator[None, None, tuple[float, float]]:
        a, b = torch.tensor([1.0]), torch.tensor([10.0])
        calls = [(a, "control"), (b, "gradient")]
        if rank:
            calls.reverse()
        handles = [network.all_reduce(rank, (0, 1), t, lane=lane) for t, lane in calls]  # type: ignore[arg-type]
        yield from wait_all(handles)
        return float(a), float(b)

    assert run_together(network, [program(0), program(1)]) == [(2.0, 20.0)] * 2


def test_broadcast_overwrites_all_but_the_root() -> None:
    network = InProcess(3)

    def program(rank: int) -> Generator[None, None, float]:
        value = torch.tensor([float(rank)])
        yield from wait(network.broadcast(rank, (0, 1, 2), value, 2))
        return float(value)

    assert run_together(network, [program(rank) for rank in range(3)]) == [2.0] * 3


def test_ranks_that_wait_for_one_another_are_a_deadlock() -> None:
    network = InProcess(2)

    def program(rank: int) -> Generator[None, None, None]:
        yield from wait(network.receive(1 - rank, rank, torch.zeros(1), "x"))
        network.send(rank, 1 - rank, torch.zeros(1), "x")

    with pytest.raises(ScheduleError, match="deadlocks"):
        run_together(network, [program(0), program(1)])
