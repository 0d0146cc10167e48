"""``Timeline``: when everything of one iteration happens, predicted or measured."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar, Literal

from pydantic import Field

from graphpipe.records import FileRecord, Record

EventKind = Literal["F", "B", "all_reduce", "optimizer"]


class Event(Record):
    """Work on one device. Times are nanoseconds from the start of the iteration."""

    rank: int
    kind: EventKind
    start_ns: int = Field(ge=0)
    end_ns: int = Field(ge=0)
    stage: int = -1
    """Stage id; -1 for all-reduce and optimizer."""
    micro_batch: int = -1
    """Number within the copy; -1 for all-reduce and optimizer."""


class Transfer(Record):
    """A message on the wire: when it starts, and when its last byte arrived."""

    source: int
    target: int
    kind: Literal["F", "B"]
    edge: int
    """Position in ``Plan.edges``."""
    start_ns: int = Field(ge=0)
    end_ns: int = Field(ge=0)
    nbytes: int = Field(default=0, ge=0)
    first_sample: int = 0
    last_sample: int = 0


class Timeline(FileRecord):
    """All events and transfers of an iteration, with the peaks that followed from them."""

    file_kind: ClassVar[str] = "graphpipe-timeline"
    written_by: ClassVar[str] = "graphpipe simulate PLAN -o FILE"
    file_version: ClassVar[int] = 1

    kind: str = file_kind
    version: int = file_version
    world_size: int = Field(ge=1)
    iteration_ns: int = Field(ge=0)
    network: Literal["channel", "shared", "measured"] = "channel"
    events: tuple[Event, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    peak_in_flight: tuple[int, ...] = ()
    """Largest number of samples in flight in each stage (of one copy)."""
    peak_memory: tuple[int, ...] = ()
    """Peak bytes of each rank; empty for a measured timeline without memory."""
    stage_names: tuple[str, ...] = ()

    @cached_property
    def busy_ns(self) -> tuple[int, ...]:
        """Nanoseconds that each rank works: tasks, all-reduces, optimizer."""
        busy = [0] * self.world_size
        for event in self.events:
            busy[event.rank] += event.end_ns - event.start_ns
        return tuple(busy)

    @property
    def bubble(self) -> float:
        """Idle share of the ranks that work at all, over the iteration; 0 for no work."""
        busy = [time for time in self.busy_ns if time]
        total = self.iteration_ns * len(busy)
        return 1 - sum(busy) / total if total else 0.0

    def __str__(self) -> str:
        """A Gantt chart in characters, as wide as the terminal."""
        from graphpipe.simulate.text import render

        return render(self)
