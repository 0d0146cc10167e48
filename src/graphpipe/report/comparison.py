"""One planner's result, as the comparison section of a report shows it."""

from __future__ import annotations

from pydantic import Field

from graphpipe.records import Record


class ComparisonRow(Record):
    """A planner and the figures of its plan; None where it found no plan.

    Attributes:
        planner: ``gpp``, ``pipedream``, ``piper``, ...
        variant: ``as published`` or ``all freedoms``; empty for ours.
        iteration_ns: Simulated iteration time.
        bubble: Idle share of the devices in use, 0 to 1.
        depth: Stages on the longest path.
        peak_memory_bytes: Of the fullest device.
        search_seconds: Time that the search took.
        note: Why there is no plan, or what to know about it.
    """

    planner: str
    variant: str = ""
    iteration_ns: int | None = Field(default=None, ge=0)
    bubble: float | None = Field(default=None, ge=0, le=1)
    depth: int | None = Field(default=None, ge=1)
    peak_memory_bytes: int | None = Field(default=None, ge=0)
    search_seconds: float | None = Field(default=None, ge=0)
    note: str = ""
