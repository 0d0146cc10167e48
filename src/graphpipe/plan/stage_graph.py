"""Questions about the stage graph of a plan as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphpipe.plan.in_flight import reverse_topological_order

if TYPE_CHECKING:
    from graphpipe.plan.plan import Plan


def depth(plan: Plan) -> int:
    """Stages on the longest path.

    Raises:
        PlanError: if the stages form a cycle.
    """
    consumers: list[list[int]] = [[] for _ in plan.stages]
    for edge in plan.edges:
        consumers[edge.source].append(edge.target)
    longest = [1] * len(consumers)
    for stage in reverse_topological_order(consumers):
        longest[stage] = 1 + max((longest[c] for c in consumers[stage]), default=0)
    return max(longest)
