"""``PipelineProblem``: a stage graph reduced to the integers that scheduling needs.

Builders, static checks, simulator and planner all work on this light form, so that a
planner can judge thousands of candidates without making a :class:`~graphpipe.plan.plan.Plan`.
It describes one copy; copies are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from graphpipe.errors import PlanError
from graphpipe.plan.ranges import SampleRange, copy_range

if TYPE_CHECKING:
    from graphpipe.plan.plan import Plan
    from graphpipe.plan.stage import Stage, StageEdge


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
    """What passes from stage ``source`` to stage ``target``: bytes per sample, and fixed bytes
    (tensors without a batch dimension) once per micro-batch of the consumer, forward and
    (gradient) backward; no backward message if ``has_gradient`` is False. ``batched`` is False
    where none of the tensors has a batch dimension, ``gradient_batched`` where none of those
    with a gradient has."""

    source: int
    target: int
    forward_bytes: float = 0.0
    forward_fixed: float = 0.0
    backward_bytes: float = 0.0
    backward_fixed: float = 0.0
    has_gradient: bool = True
    batched: bool = True
    gradient_batched: bool = True


@dataclass(frozen=True)
class PipelineProblem:
    """Stages, edges and the ``samples`` of one copy; ``world_size`` bounds the ranks."""

    stages: tuple[StageSpec, ...]
    edges: tuple[EdgeSpec, ...]
    samples: int
    world_size: int


def problem_of(
    plan: Plan, copy: int = 0, batch_size: int | None = None, *, training: bool = True
) -> tuple[PipelineProblem, SampleRange]:
    """One copy of a plan as a problem, and the samples of the mini-batch that it owns.

    Args:
        plan: The plan.
        copy: Number of the copy.
        batch_size: Samples of this mini-batch, by default the plan's. For more than the plan's
            a stage that had all samples in flight gets the bound that the formula gives.
        training: False for an evaluation: no stage has a backward, and ``in_flight``, at least
            the formula's, bounds how far each stage runs ahead.

    Raises:
        PlanError: if a stage has times, but none for the kind of one of its devices.
    """
    owned = copy_range(copy, plan.copies, batch_size if batch_size is not None else plan.batch_size)
    stages = tuple(_stage_spec(plan, stage, copy, training) for stage in plan.stages)
    edges = tuple(edge_spec(edge) for edge in plan.edges)
    problem = PipelineProblem(stages, edges, len(owned), plan.world_size)
    planned = len(copy_range(copy, plan.copies, plan.batch_size))
    if not training:
        problem = _with_room(problem, 0)
    elif len(owned) > planned:
        problem = _with_room(problem, planned)
    return problem, owned


def _with_room(problem: PipelineProblem, planned: int) -> PipelineProblem:
    """Gives stages that may have ``planned`` samples in flight at least the formula's bound.

    In a larger mini-batch than planned a bound of all samples no longer is one; and in an
    evaluation bounds hold back the forwards on every edge, where less would deadlock.
    """
    from graphpipe.plan.in_flight import with_bounds  # it builds on this module

    stages = tuple(
        stage._replace(in_flight=max(stage.in_flight, free.in_flight))
        if stage.in_flight >= planned
        else stage
        for stage, free in zip(problem.stages, with_bounds(problem).stages, strict=True)
    )
    return PipelineProblem(stages, problem.edges, problem.samples, problem.world_size)


def _stage_spec(plan: Plan, stage: Stage, copy: int, training: bool) -> StageSpec:
    devices = stage.devices[copy * stage.replicas : (copy + 1) * stage.replicas]
    forward = backward = 0
    for rank in devices if stage.times else ():
        kind = plan.cluster.devices[rank].kind
        if kind not in stage.times:
            raise PlanError(
                f"Stage {stage.name!r} has no times for the kind of device {rank}",
                expected=f"times for {kind!r}",
                got=", ".join(sorted(stage.times)),
                fix="Plan again with costs for every kind of device",
            )
        forward = max(forward, stage.times[kind].forward_ns)
        backward = max(backward, stage.times[kind].backward_ns)
    has_backward = stage.has_backward and training
    return StageSpec(
        stage.micro_batch,
        stage.replicas,
        stage.block,
        stage.in_flight,
        devices,
        forward,
        backward if has_backward else 0,
        has_backward,
    )


def edge_spec(edge: StageEdge) -> EdgeSpec:
    """The light form of an edge of a plan."""
    tensors = edge.tensors
    return EdgeSpec(
        edge.source,
        edge.target,
        sum(t.bytes_per_sample for t in tensors),
        sum(t.fixed_bytes for t in tensors),
        sum(t.gradient_bytes_per_sample for t in tensors),
        sum(t.gradient_fixed_bytes for t in tensors),
        edge.has_gradient,
        any(t.rows_per_sample is not None for t in tensors),
        any(t.rows_per_sample is not None for t in tensors if t.has_gradient),
    )
