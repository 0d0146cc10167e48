"""Which copies of a plan are alike, so that what holds for one need not be computed for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphpipe.plan.problem import problem_of

if TYPE_CHECKING:
    from graphpipe.plan.plan import Plan


def ranks_of_copy(plan: Plan, copy: int) -> list[int]:
    """The ranks of a copy in the order in which its stages name them."""
    ranks: dict[int, None] = {}
    for stage in plan.stages:
        for rank in stage.devices[copy * stage.replicas : (copy + 1) * stage.replicas]:
            ranks[rank] = None
    return list(ranks)


def alike_copies(plan: Plan) -> list[list[int]]:
    """The copies in groups: those of a group have the same samples, times, schedule and links
    between corresponding ranks, which are those at the same place of :func:`ranks_of_copy`."""
    groups: dict[object, list[int]] = {}
    for copy in range(plan.copies):
        problem, owned = problem_of(plan, copy)
        ranks = ranks_of_copy(plan, copy)
        number = {rank: place for place, rank in enumerate(ranks)}
        places = tuple(tuple(number[rank] for rank in spec.devices) for spec in problem.stages)
        times = tuple((spec.forward_ns, spec.backward_ns) for spec in problem.stages)
        pairs = sorted(
            {
                (here, there)
                for edge in problem.edges
                for here in problem.stages[edge.source].devices
                for there in problem.stages[edge.target].devices
            },
            key=lambda pair: (number[pair[0]], number[pair[1]]),
        )
        links = tuple(
            (plan.cluster.link(here, there), plan.cluster.link(there, here))
            for here, there in pairs
        )
        lines = tuple(plan.schedule.lines[rank] for rank in ranks)
        key = (len(owned), places, times, links, lines)
        groups.setdefault(key, []).append(copy)
    return list(groups.values())
