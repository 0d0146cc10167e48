"""From scheduled layouts to a plan: the finalists are assembled and simulated in full."""

from __future__ import annotations

from collections.abc import Sequence

from graphpipe.plan.assemble import StageChoice, assemble
from graphpipe.plan.plan import Plan
from graphpipe.planner.explore import Found
from graphpipe.planner.space import Space
from graphpipe.simulate.light import simulate_problem
from graphpipe.simulate.predict import with_prediction


def realised(
    space: Space,
    found: Found,
    *,
    notes: Sequence[str] = (),
    planner: str = "gpp",
    lower_bound_ns: int = 0,
) -> Plan:
    """A scheduled layout as a plan, with the prediction of a full simulation.

    Args:
        space: The search space that it comes from.
        found: The layout, all of its tasks scheduled.
        notes: Remarks for the user.
        planner: Name of the planner.
        lower_bound_ns: What no plan can beat.
    """
    return with_prediction(to_plan(space, found, notes, planner), lower_bound_ns=lower_bound_ns)


def by_contention(space: Space, finalists: Sequence[Found]) -> Found:
    """The fastest of some scheduled layouts where messages share links and network cards."""
    best, shortest = finalists[0], float("inf")
    for found in sorted(finalists, key=lambda f: f.key):
        # Contention only adds to what a schedule takes without.
        if found.score.iteration_ns < shortest and (taken := contended_ns(space, found)) < shortest:
            best, shortest = found, taken
    return best


def contended_ns(space: Space, found: Found) -> int:
    """Iteration of a scheduled layout where messages share links and network cards.

    One copy is simulated where the others are like it; copies that lie side by side share
    network cards with one another, so there all of them are.
    """
    layout, score = found.layout, found.score
    if layout.far and layout.copies > 1:
        whole = with_prediction(to_plan(space, found, (), "")).prediction
        assert whole is not None
        return whole.iteration_ns
    structure = space.structure(layout.assign, layout.merged)
    assert structure is not None
    ranks = space.part_ranks(layout)
    costs, devices = space.units.costs, space.cluster.devices
    groups: list[tuple[tuple[int, ...], int]] = []
    optimizer = [0] * space.cluster.world_size
    for part, stages in enumerate(structure.of_part):
        nbytes = sum(structure.facts[s].gradient for s in stages)
        tensors = sum(structure.facts[s].gradient_tensors for s in stages)
        if nbytes and len(ranks[part]) > 1:
            groups.append((ranks[part], round(nbytes)))
        for rank in ranks[part]:
            seconds = costs.device_costs(devices[rank].kind).optimizer_seconds(nbytes, tensors)
            optimizer[rank] = round(seconds * 1e9)
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
