"""A timeline as a Chrome trace, the JSON that Perfetto and chrome://tracing open.

Ranks are threads of one process; messages are arrows from the task that sent to the task
that needed them. Times are microseconds, as the format has them.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from graphpipe.simulate.timeline import Event, Timeline

_NAMES = {"F": "forward", "B": "backward", "all_reduce": "all-reduce", "optimizer": "optimizer"}
_COLOURS = {
    "F": "thread_state_running",
    "B": "thread_state_iowait",
    "all_reduce": "rail_load",
    "optimizer": "rail_idle",
}


def chrome_trace(*timelines: Timeline) -> dict[str, Any]:
    """The trace of one or several timelines, each a process of its own.

    Give the predicted and the measured timeline of a plan to see one above the other.
    """
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        name = "measured" if timeline.network == "measured" else f"predicted ({timeline.network})"
        events.append(_meta("process_name", process, 0, name))
        for rank in range(timeline.world_size):
            events.append(_meta("thread_name", process, rank, f"rank {rank}"))
        events += [_slice(timeline, process, event) for event in timeline.events]
        events += _arrows(timeline, process)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(path: str | os.PathLike[str], *timelines: Timeline) -> None:
    """Writes :func:`chrome_trace` to a file in one step."""
    target = Path(path)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=target.parent, prefix=target.name, delete=False
    ) as out:
        json.dump(chrome_trace(*timelines), out)
    Path(out.name).chmod(0o644)
    Path(out.name).replace(target)


def _meta(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(timeline: Timeline, process: int, event: Event) -> dict[str, Any]:
    args: dict[str, Any] = {"what": _NAMES[event.kind]}
    name = _NAMES[event.kind]
    if event.stage >= 0:
        stage = (
            timeline.stage_names[event.stage]
            if event.stage < len(timeline.stage_names)
            else f"stage {event.stage}"
        )
        name = f"{event.kind}{event.stage}.{event.micro_batch} {stage}"
        args |= {"stage": event.stage, "micro_batch": event.micro_batch}
    return {
        "ph": "X",
        "name": name,
        "cat": _NAMES[event.kind],
        "cname": _COLOURS[event.kind],
        "pid": process,
        "tid": event.rank,
        "ts": event.start_ns / 1000,
        "dur": (event.end_ns - event.start_ns) / 1000,
        "args": args,
    }


def _arrows(timeline: Timeline, process: int) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for number, transfer in enumerate(timeline.transfers):
        common = {
            "name": "tensors" if transfer.kind == "F" else "gradients",
            "cat": "message",
            "id": f"{process}.{number}",
            "pid": process,
            "args": {
                "edge": transfer.edge,
                "bytes": transfer.nbytes,
                "samples": f"{transfer.first_sample}-{transfer.last_sample}",
            },
        }
        begin = {"ph": "s", "tid": transfer.source, "ts": transfer.start_ns / 1000}
        end = {"ph": "f", "bp": "e", "tid": transfer.target, "ts": transfer.end_ns / 1000}
        out += [common | begin, common | end]
    return out
