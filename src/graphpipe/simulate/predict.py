"""The figures of a plan's simulated iteration, to be kept in the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from graphpipe.plan.plan import Prediction
from graphpipe.plan.stage_graph import depth
from graphpipe.simulate.simulator import simulate
from graphpipe.simulate.timeline import Timeline

if TYPE_CHECKING:
    from graphpipe.plan.plan import Plan


def prediction_of(plan: Plan, timeline: Timeline, *, lower_bound_ns: int = 0) -> Prediction:
    """Summarises a timeline of the plan.

    ``communication_ns`` is the time for which the busiest rank's messages were under way,
    ``all_reduce_ns`` and ``optimizer_ns`` those of the rank that spends most on them.

    Args:
        plan: The plan.
        timeline: Its simulated iteration.
        lower_bound_ns: The planner's bound, where there is one.
    """
    sending = [0] * plan.world_size
    for transfer in timeline.transfers:
        sending[transfer.source] += transfer.end_ns - transfer.start_ns
    spent = {"all_reduce": [0] * plan.world_size, "optimizer": [0] * plan.world_size}
    for event in timeline.events:
        if event.kind == "all_reduce" or event.kind == "optimizer":
            spent[event.kind][event.rank] += event.end_ns - event.start_ns
    return Prediction(
        iteration_ns=timeline.iteration_ns,
        bottleneck_ns=max(timeline.busy_ns),
        bubble=min(1.0, max(0.0, timeline.bubble)),
        depth=depth(plan),
        communication_ns=max(sending),
        all_reduce_ns=max(spent["all_reduce"]),
        optimizer_ns=max(spent["optimizer"]),
        peak_memory=timeline.peak_memory,
        lower_bound_ns=lower_bound_ns,
    )


def with_prediction(
    plan: Plan,
    *,
    network: Literal["channel", "shared"] = "shared",
    lower_bound_ns: int = 0,
) -> Plan:
    """The plan with the figures of its simulated iteration."""
    timeline = simulate(plan, network=network)
    prediction = prediction_of(plan, timeline, lower_bound_ns=lower_bound_ns)
    return plan.model_copy(update={"prediction": prediction})
