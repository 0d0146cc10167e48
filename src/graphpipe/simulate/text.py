"""A timeline as text: a Gantt chart in characters."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from graphpipe.simulate.timeline import Event, Timeline
from graphpipe.units import format_ns

_IDLE, _REDUCE, _OPTIMIZER = ".", "=", "*"
_LEAST_COLUMNS = 10


def render(timeline: Timeline, width: int | None = None) -> str:
    """A line for each rank, time from left to right.

    A task is a run of its stage's letter, small for a forward and capital for a backward; its
    number follows the first letter where there is room. ``=`` is all-reduce, ``*`` the
    optimizer, ``.`` idle. A column shows what fills most of it.

    Args:
        timeline: Predicted or measured.
        width: Characters of a line, by default the terminal's.
    """
    total = max(1, timeline.iteration_ns)
    columns = width if width is not None else shutil.get_terminal_size((100, 24)).columns
    label = len(f"rank {timeline.world_size - 1}")
    room = max(_LEAST_COLUMNS, columns - label - len(" ||") - len(" 100%"))
    by_rank: list[list[Event]] = [[] for _ in range(timeline.world_size)]
    for event in timeline.events:
        by_rank[event.rank].append(event)
    lines = [
        f"{f'rank {rank}':<{label}} |{_row(events, total, room)}|"
        f"{100 * timeline.busy_ns[rank] / total:4.0f}%"
        for rank, events in enumerate(by_rank)
    ]
    scale = f"{'':<{label}} 0{format_ns(total):>{room}}"
    return "\n".join([*lines, scale, *_legend(timeline, max(columns, label + room))])


def _row(events: Sequence[Event], total: int, room: int) -> str:
    cells = [_IDLE] * room
    filled = [0] * room
    for event in sorted(events, key=lambda e: e.start_ns):
        mark = symbol(event)
        first = min(room - 1, event.start_ns * room // total)
        last = min(room - 1, max(event.start_ns, event.end_ns - 1) * room // total)
        own: list[int] = []
        for column in range(first, last + 1):
            # Exact in integers: both sides are times multiplied by the number of columns.
            start = max(event.start_ns * room, column * total)
            share = min(event.end_ns * room, (column + 1) * total) - start
            if share > filled[column] and 2 * share >= total:
                cells[column], filled[column] = mark, share
                own.append(column)
        text = str(event.micro_batch) if event.micro_batch >= 0 else ""
        if len(own) > len(text) + 1 and own[-1] - own[0] + 1 == len(own):
            for column, character in zip(own[1:], text, strict=False):
                cells[column] = character
    return "".join(cells)


def symbol(event: Event) -> str:
    """The character that stands for an event."""
    if event.kind == "all_reduce":
        return _REDUCE
    if event.kind == "optimizer":
        return _OPTIMIZER
    letter = chr(ord("a") + event.stage % 26)
    return letter if event.kind == "F" else letter.upper()


def _legend(timeline: Timeline, width: int) -> list[str]:
    kinds = {event.kind for event in timeline.events}
    items = [
        f"{chr(ord('a') + stage % 26)} {name}" for stage, name in enumerate(timeline.stage_names)
    ]
    items.append("small: forward")
    if "B" in kinds:
        items.append("capital: backward")
    if "all_reduce" in kinds:
        items.append(f"{_REDUCE} all-reduce")
    if "optimizer" in kinds:
        items.append(f"{_OPTIMIZER} optimizer")
    items.append(f"{_IDLE} idle ({timeline.bubble:.0%} of the ranks in use)")
    lines = [""]
    for item in items:
        joined = f"{lines[-1]}  {item}" if lines[-1] else item
        if len(joined) > width and lines[-1]:
            lines.append(item[:width])
        else:
            lines[-1] = joined[:width]
    return lines
