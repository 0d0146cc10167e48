"""Cutting a trunk into pieces that go round the devices."""

from __future__ import annotations

from random import Random

import pytest

from graphpipe.planner.interleave import (
    ROUND,
    TO_AND_FRO,
    device_shares,
    devices_of,
    most_in_flight,
    pieces_of,
    round_robin_lists,
)


def test_pieces_go_round_or_to_and_fro() -> None:
    assert devices_of(6, (4, 5, 6), ROUND) == [4, 5, 6, 4, 5, 6]
    assert devices_of(6, (4, 5, 6), TO_AND_FRO) == [4, 5, 6, 6, 5, 4]


@pytest.mark.parametrize("seed", range(30))
def test_pieces_are_the_order_cut_in_parts_near_their_shares(seed: int) -> None:
    random = Random(seed)
    count, parts = random.randint(8, 60), random.randint(1, 8)
    order = random.sample(range(count), count)
    work = [random.uniform(0.5, 1.5) for _ in range(count)]
    pieces = pieces_of(order, work, [1.0] * parts)
    assert pieces is not None
    assert len(pieces) == parts
    assert [u for piece in pieces for u in piece] == order
    assert all(pieces)
    largest = max(sum(work[u] for u in piece) for piece in pieces)
    assert largest <= sum(work) / parts + 1.5


def test_too_few_units_give_no_pieces() -> None:
    assert pieces_of([0, 1], [1.0, 1.0], [1.0] * 3) is None


def test_devices_with_other_work_get_less_of_the_trunk() -> None:
    hosts = devices_of(8, range(4), ROUND)
    load = [6.0, 0.0, 0.0, 0.0]
    work = [1.0] * 64
    shares = device_shares(8, range(4), ROUND, load, 64.0)
    pieces = pieces_of(range(64), work, shares, hosts, load)
    assert pieces is not None
    total = list(load)
    for piece, host in zip(pieces, hosts, strict=True):
        total[host] += len(piece)
    assert max(total) - min(total) <= 2.0


def most_at_once(line: list[tuple[bool, int, int]]) -> int:
    """Micro-batches in flight in all pieces of a device together, at most."""
    now = most = 0
    for back, _, _ in line:
        now += -1 if back else 1
        most = max(most, now)
    return most


def test_one_piece_a_device_is_1f1b() -> None:
    lists = round_robin_lists(3, 3, 4)
    assert [[(back, i) for back, _, i in line] for line in lists][2] == [
        (False, 0), (True, 0), (False, 1), (True, 1), (False, 2), (True, 2), (False, 3), (True, 3)
    ]  # fmt: skip
    assert [most_in_flight(line)[piece] for piece, line in enumerate(lists)] == [3, 2, 1]


@pytest.mark.parametrize("turns", [2, 3])
def test_interleaving_keeps_about_as_much_as_1f1b_and_one_turn(turns: int) -> None:
    devices, micro_batches = 4, 16
    lists = round_robin_lists(devices * turns, devices, micro_batches)
    for device, line in enumerate(lists):
        assert sorted(line) == sorted(
            (back, piece, i)
            for back in (False, True)
            for piece in range(device, devices * turns, devices)
            for i in range(micro_batches)
        )
        most = most_at_once(line)
        # Pieces of 1/turns of a stage: (turns - 1) rounds and twice the way to the last device.
        assert most == (turns - 1) * devices + 2 * (devices - 1 - device) + 1


def test_fewer_forwards_first_save_memory() -> None:
    def held(extra: int) -> int:
        return most_at_once(round_robin_lists(8, 4, 16, extra)[0])

    assert held(-3) < held(0) < held(2)
    assert round_robin_lists(8, 4, 16, -3) == round_robin_lists(8, 4, 16, -30)
