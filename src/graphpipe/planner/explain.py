"""``explain``: why a plan takes what it takes, in words."""

from __future__ import annotations

from graphpipe.cost.table import CostTable
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.planner.lower_bound import LowerBound, explain_gap, lower_bound
from graphpipe.simulate.simulator import simulate
from graphpipe.simulate.timeline import Timeline
from graphpipe.simulate.usage import device_uses
from graphpipe.simulate.words import describe
from graphpipe.units import format_ns, format_percent


def explain(plan: Plan, graph: ModelGraph | None = None, costs: CostTable | None = None) -> str:
    """The bottleneck, the bubble, communication, memory, and how far from the bound it is.

    Args:
        plan: The plan; it is simulated again.
        graph: Its graph. With ``costs`` it allows to say what the gap to the lower bound is
            made of.
        costs: Its costs.
    """
    timeline = simulate(plan)
    if graph is None or costs is None:
        return "\n".join([*describe(plan, timeline), *plan.notes])
    bound = lower_bound(graph, costs, plan.cluster, plan.batch_size)
    sentences = describe(plan, timeline, bound=False)
    return "\n".join([*sentences, _gap(plan, timeline, bound), *plan.notes])


def _gap(plan: Plan, timeline: Timeline, bound: LowerBound) -> str:
    uses = device_uses(plan, timeline)
    gap = explain_gap(
        bound,
        timeline.iteration_ns / 1e9,
        [(use.forward_ns + use.recompute_ns + use.backward_ns) / 1e9 for use in uses],
        recompute_seconds=sum(use.recompute_ns for use in uses) / 1e9,
        all_reduce_seconds=[use.all_reduce_ns / 1e9 for use in uses],
        optimizer_seconds=[use.optimizer_ns / 1e9 for use in uses],
    )
    parts = {
        "small micro-batches": gap.efficiency,
        "recomputation": gap.recompute,
        "all-reduce": gap.all_reduce,
        "optimizer": gap.optimizer,
        "imbalance": gap.imbalance,
        "bubble": gap.bubble,
    }
    # A part may be negative: a bubble cannot, but a device can work less than the ideal share.
    text = ", ".join(f"{k} {format_ns(x * 1e9)}" for k, x in parts.items() if abs(x) >= 1e-9)
    share = timeline.iteration_ns / max(1, bound.nanoseconds) - 1
    return (
        f"No plan for this input can take less than {format_ns(bound.nanoseconds)} "
        f"({bound.binding.replace('_', ' ')}); this one is {format_percent(share)} above that "
        f"bound. Above the ideal work of a device, "
        f"{format_ns(bound.ideal_work / plan.world_size * 1e9)}, lie {text}."
    )
