"""Cutting a trunk into pieces, several of them for each device.

With v pieces a device, piece i on device i mod d, a micro-batch passes every device v times
and a device waits only 1/v as long for its first task: the bubble is v times shorter
(interleaved pipelines, Narayanan et al., SC 2021). Run to and fro (0, 1, .. d-1, d-1, .. 0)
the first and the last piece share a device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

ROUND, TO_AND_FRO = "round", "to and fro"


def pieces_of(
    order: Sequence[int],
    work: Sequence[float],
    shares: Sequence[float],
    hosts: Sequence[int] | None = None,
    load: Sequence[float] = (),
) -> list[tuple[int, ...]] | None:
    """Cuts an order of units into consecutive pieces.

    Borders are put where the running work comes nearest to the running share; then single
    units are moved across borders while that lowers what the busiest device has to do.

    Args:
        order: Units in a topological order.
        work: Work of each unit, by number.
        shares: Relative work that each piece should get.
        hosts: Device of each piece, by default one each.
        load: Work that each device has besides.

    Returns:
        Units of each piece; None if there are fewer units than pieces.
    """
    parts = len(shares)
    if len(order) < parts:
        return None
    sums = [0.0, *accumulate([work[u] for u in order])]
    whole = sums[-1] / sum(shares)
    stops = [0]
    for part, share in enumerate(accumulate(shares)):
        least, most = stops[-1] + 1, len(order) - (parts - 1 - part)
        stop = bisect_right(sums, share * whole)
        if stop < len(sums) and sums[stop] - share * whole > share * whole - sums[stop - 1]:
            stop -= 1
        stops.append(min(max(stop, least), most))
    stops[-1] = len(order)
    _level(sums, stops, list(hosts) if hosts is not None else list(range(parts)), load)
    return [tuple(order[a:b]) for a, b in pairwise(stops)]


def _level(
    sums: Sequence[float], stops: list[int], hosts: Sequence[int], load: Sequence[float]
) -> None:
    """Moves borders by one unit while the busiest device gets less to do."""
    total = [0.0] * max(max(hosts) + 1, len(load))
    total[: len(load)] = load
    of: list[list[int]] = [[] for _ in total]
    for piece, host in enumerate(hosts):
        total[host] += sums[stops[piece + 1]] - sums[stops[piece]]
        of[host].append(piece)
    for _ in range(4 * len(hosts)):
        worst = max(range(len(total)), key=total.__getitem__)
        best: tuple[float, int, int, int, float] | None = None
        for piece in of[worst]:
            if stops[piece + 1] - stops[piece] < 2:
                continue
            for other, border, step in ((piece - 1, piece, 1), (piece + 1, piece + 1, -1)):
                if not 0 <= other < len(hosts) or hosts[other] == worst:
                    continue
                unit = stops[border] if step > 0 else stops[border] - 1
                moved = sums[unit + 1] - sums[unit]
                top = max(total[worst] - moved, total[hosts[other]] + moved)
                if top < total[worst] * (1 - 1e-9) and (best is None or top < best[0]):
                    best = (top, border, step, hosts[other], moved)
        if best is None:
            return
        _, border, step, other, moved = best
        stops[border] += step
        total[worst] -= moved
        total[other] += moved


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
        extra: Forwards to start with beyond what fills the pipeline, which hides messages;
            negative: fewer (never fewer than run without a deadlock), which saves memory.
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
        behind = min(devices, pieces) - 1 - device
        least = behind + (len(own) - 1) * devices
        first = least + (behind if len(own) > 1 else 0) + extra
        first = min(len(forward), max(least, first))
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
