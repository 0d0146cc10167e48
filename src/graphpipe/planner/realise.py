"""From scheduled layouts to a plan: the finalists are assembled and simulated in full."""

from __future__ import annotations

from collections.abc import Sequence

from graphpipe.plan.assemble import StageChoice, assemble
from graphpipe.plan.plan import Plan
from graphpipe.plan.ranges import copy_range, micro_batch_count
from graphpipe.plan.schedule import Task
from graphpipe.planner.explore import Found
from graphpipe.planner.lower_bound import lower_bound
from graphpipe.planner.space import Space
from graphpipe.simulate.predict import with_prediction


def realise(
    space: Space, finalists: Sequence[Found], *, notes: Sequence[str] = (), planner: str = "gpp"
) -> Plan:
    """The best of the finalists under full simulation with contention, as a plan.

    Args:
        space: The search space that they come from.
        finalists: At least one.
        notes: Remarks for the user.
        planner: Name of the planner.
    """
    graph = space.units.graph
    bound = lower_bound(graph, space.units.costs, space.cluster, space.batch_size).nanoseconds
    best: Plan | None = None
    for found in finalists:
        plan = with_prediction(to_plan(space, found, notes, planner), lower_bound_ns=bound)
        if best is None or _iteration(plan) < _iteration(best):
            best = plan
    assert best is not None
    return best


def _iteration(plan: Plan) -> int:
    assert plan.prediction is not None
    return plan.prediction.iteration_ns


def to_plan(space: Space, found: Found, notes: Sequence[str], planner: str) -> Plan:
    """A scheduled layout as a plan without prediction."""
    layout = found.layout
    graph = space.units.graph
    structure = space.structure(layout.assign, layout.merged)
    assert structure is not None
    ranks = space.part_ranks(layout)
    problem = found.score.graph.problem
    choices = []
    for s, units in enumerate(structure.stages):
        part = structure.part[s]
        spec = problem.stages[s]
        per_copy = layout.replicas[part]
        devices = tuple(
            ranks[part][copy * per_copy + q]
            for copy in range(layout.copies)
            for q in range(spec.replicas)
        )
        ops = sorted(op for u in units for op in space.units.members[u])
        choices.append(
            StageChoice(
                ops=tuple(graph.ops[op].name for op in ops),
                micro_batch=spec.micro_batch,
                replicas=spec.replicas,
                devices=devices,
                block=spec.block,
                in_flight=spec.in_flight,
                recompute=layout.recomputes(part) and spec.has_backward,
            )
        )
    return assemble(
        graph,
        space.units.costs,
        space.cluster,
        choices,
        batch_size=space.batch_size,
        copies=layout.copies,
        lines=_lines(space, found, ranks),
        planner=planner,
        notes=tuple(notes),
    )


def _lines(space: Space, found: Found, ranks: Sequence[tuple[int, ...]]) -> list[list[Task]]:
    """Task lists of all ranks: those of copy 0, repeated on the devices of the others.

    The schedule is that of the largest copy; a smaller one leaves out what it has not.
    """
    layout, score = found.layout, found.score
    tasks = score.graph.tasks(score.timed.lines)
    stages = score.graph.problem.stages
    out: list[list[Task]] = [[] for _ in range(space.cluster.world_size)]
    for copy in range(layout.copies):
        samples = len(copy_range(copy, layout.copies, space.batch_size))
        counts = [micro_batch_count(samples, stage.micro_batch) for stage in stages]
        for part, per_copy in enumerate(layout.replicas):
            for q in range(per_copy):
                out[ranks[part][copy * per_copy + q]] = [
                    task for task in tasks[ranks[part][q]] if task.micro_batch < counts[task.stage]
                ]
    return out
