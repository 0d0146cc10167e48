"""Cutting a trunk into pieces, several of them for each device.

With v pieces a device, piece i on device i mod d, a micro-batch passes every device v times
and a device waits only 1/v as long for its first task: the bubble is v times shorter
(interleaved pipelines, Narayanan et al., SC 2021). Run to and fro (0, 1, .. d-1, d-1, .. 0)
the first and the last piece share a device.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphpipe.planner.constructive import cut

ROUND, TO_AND_FRO = "round", "to and fro"


def pieces_of(
    order: Sequence[int], work: Sequence[float], parts: int, shares: Sequence[float] | None = None
) -> list[tuple[int, ...]] | None:
    """Cuts an order of units into consecutive pieces.

    Args:
        order: Units in a topological order.
        work: Work of each unit, by number.
        parts: How many pieces.
        shares: Relative work that each piece should get, by default the same.

    Returns:
        Units of each piece; None if there are fewer units than pieces.
    """
    if len(order) < parts:
        return None
    found = cut(order, {1: work}, list(shares) if shares is not None else [1.0] * parts)
    if found is None or len(found.replicas) != parts:
        return _even(order, work, parts)
    out: list[list[int]] = [[] for _ in range(parts)]
    for u in order:
        out[found.assign[u]].append(u)
    if not all(out):
        return _even(order, work, parts)
    return [tuple(piece) for piece in out]


def _even(order: Sequence[int], work: Sequence[float], parts: int) -> list[tuple[int, ...]]:
    """Cuts where the running work passes k / parts, each piece with at least one unit."""
    total = sum(work[u] for u in order)
    out: list[tuple[int, ...]] = []
    start, done = 0, 0.0
    for part in range(parts):
        stop = start + 1
        done += work[order[start]]
        last = len(order) - (parts - 1 - part)
        limit = total * (part + 1) / parts
        while stop < last and (part == parts - 1 or done + work[order[stop]] / 2 <= limit):
            done += work[order[stop]]
            stop += 1
        out.append(tuple(order[start:stop]))
        start = stop
    return out


def devices_of(parts: int, devices: Sequence[int], way: str) -> list[int]:
    """The device of each piece."""
    count = len(devices)
    out = []
    for i in range(parts):
        turn, place = divmod(i, count)
        back = way == TO_AND_FRO and turn % 2 == 1
        out.append(devices[count - 1 - place if back else place])
    return out


def device_shares(
    parts: int, devices: Sequence[int], way: str, load: Sequence[float], total: float
) -> list[float]:
    """Share of the trunk's work for each piece so that every device has as much in the end.

    Args:
        parts: Pieces.
        devices: Devices that host them.
        way: How the pieces go round.
        load: Work that each device (by number) has besides.
        total: Work of the trunk.
    """
    even = (total + sum(load[d] for d in devices)) / len(devices)
    hosts = devices_of(parts, devices, way)
    least = 0.02 * total / parts
    return [max(least, (even - load[d]) / hosts.count(d)) for d in hosts]


def round_robin_lists(
    pieces: int, devices: int, micro_batches: int, extra: int = 0
) -> list[list[tuple[bool, int, int]]]:
    """The order of interleaved 1F1B: by device the (backward, piece, micro-batch) of its tasks.

    Micro-batches go through in groups of as many as there are devices; a device runs a group
    through its first piece, then through its second, and so on. It starts with as many
    forwards as fill the pipeline, then one backward and one forward in turn. With one piece a
    device it is 1F1B.

    Args:
        pieces: Pieces, piece i on device i mod ``devices``.
        devices: Devices.
        micro_batches: Micro-batches of each piece.
        extra: Forwards to start with beyond what fills the pipeline, which hides messages.
    """
    out = []
    for device in range(devices):
        own = range(device, pieces, devices)
        groups = [
            range(start, min(start + devices, micro_batches))
            for start in range(0, micro_batches, devices)
        ]
        forward = [(False, piece, i) for group in groups for piece in own for i in group]
        backward = [(True, piece, i) for group in groups for piece in own[::-1] for i in group]
        last = pieces - 1
        if len(own) > 1:
            first = 2 * (devices - 1 - device) + (len(own) - 1) * devices
        else:
            first = (last - device) % devices if pieces >= devices else last - device
        first = min(len(forward), first + extra)
        line = forward[:first]
        for at in range(first, len(forward)):
            line += [forward[at], backward[at - first]]
        out.append(line + backward[len(forward) - first :])
    return out


def most_in_flight(line: Sequence[tuple[bool, int, int]]) -> dict[int, int]:
    """By piece the most micro-batches that a task list has in flight."""
    now: dict[int, int] = {}
    most: dict[int, int] = {}
    for backward, piece, _ in line:
        now[piece] = now.get(piece, 0) + (-1 if backward else 1)
        most[piece] = max(most.get(piece, 0), now[piece])
    return most
