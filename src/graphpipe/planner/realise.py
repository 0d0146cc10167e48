"""From scheduled layouts to a plan: the finalists are assembled and simulated in full."""

from __future__ import annotations

from collections.abc import Sequence

from graphpipe.plan.assemble import StageChoice, assemble
from graphpipe.plan.plan import Plan
from graphpipe.planner.explore import Found
from graphpipe.planner.lower_bound import lower_bound
from graphpipe.planner.space import Space
from graphpipe.simulate.light import simulate_problem
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
    best = min(finalists, key=lambda found: (contended_ns(space, found), found.key))
    return with_prediction(to_plan(space, best, notes, planner), lower_bound_ns=bound)


def contended_ns(space: Space, found: Found) -> int:
    """Iteration of a scheduled layout where messages share links and network cards.

    One copy is simulated; the others are like it.
    """
    layout, score = found.layout, found.score
    structure = space.structure(layout.assign, layout.merged)
    assert structure is not None
    ranks = space.part_ranks(layout)
    costs, devices = space.units.costs, space.cluster.devices
    groups: list[tuple[tuple[int, ...], int]] = []
    optimizer = [0] * space.cluster.world_size
    for part, stages in enumerate(structure.of_part):
        nbytes = sum(structure.facts[s].gradient for s in stages)
        if nbytes and len(ranks[part]) > 1:
            groups.append((ranks[part], round(nbytes)))
        for rank in ranks[part]:
            per_byte = costs.device_costs(devices[rank].kind).optimizer_seconds_per_byte
            optimizer[rank] = round(nbytes * per_byte * 1e9)
    problem = space.problem(layout)
    assert problem is not None
    return simulate_problem(
        problem,
        score.timed.lines,
        space.cluster,
        network="shared",
        groups=groups,
        optimizer_ns=optimizer,
    ).iteration_ns


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
        lines=found.score.graph.tasks(found.score.timed.lines),
        planner=planner,
        notes=tuple(notes),
    )
