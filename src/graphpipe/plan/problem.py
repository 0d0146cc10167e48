"""``PipelineProblem``: a stage graph reduced to the integers that scheduling needs.

Builders, static checks, simulator and planner all work on this light form, so that a
planner can judge thousands of candidates without making a :class:`~graphpipe.plan.plan.Plan`.
It describes one copy; copies are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class StageSpec(NamedTuple):
    """One stage. ``devices`` holds one rank per replica; times are nanoseconds of one full
    micro-batch on the slowest of them (backward includes recomputation)."""

    micro_batch: int
    replicas: int
    block: int
    in_flight: int
    devices: tuple[int, ...]
    forward_ns: int
    backward_ns: int
    has_backward: bool = True


class EdgeSpec(NamedTuple):
    """What passes from stage ``source`` to stage ``target``: bytes per sample and fixed bytes
    per message, forward and (gradient) backward; no backward message if ``has_gradient`` is
    False."""

    source: int
    target: int
    forward_bytes: float = 0.0
    forward_fixed: float = 0.0
    backward_bytes: float = 0.0
    backward_fixed: float = 0.0
    has_gradient: bool = True


@dataclass(frozen=True)
class PipelineProblem:
    """Stages, edges and the ``samples`` of one copy; ``world_size`` bounds the ranks."""

    stages: tuple[StageSpec, ...]
    edges: tuple[EdgeSpec, ...]
    samples: int
    world_size: int
