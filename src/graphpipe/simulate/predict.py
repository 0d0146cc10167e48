"""The figures of a plan's simulated iteration, to be kept in the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from graphpipe.plan.memory import peak_memory
from graphpipe.plan.ordered import Sent
from graphpipe.plan.plan import Prediction
from graphpipe.plan.stage_graph import depth
from graphpipe.plan.task_graph import TaskGraph
from graphpipe.simulate.simulator import run_plan
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
    """The plan with the figures of its simulated iteration: those of :func:`prediction_of`,
    without making the timeline."""
    parts, _, runs, finished = run_plan(plan, network=network)
    busy = [0] * plan.world_size
    sending = [0] * plan.world_size
    reducing = [sum(end - start for start, end in done.reduces) for done in finished]
    stepping = [done.optimizer[1] - done.optimizer[0] for done in finished]
    for (graph, lines), run in zip(parts, runs, strict=True):
        for rank, line in enumerate(lines):
            busy[rank] += sum(graph.duration[number] for number in line)
        for sent in run.sent:
            if not _is_credit(graph, sent):
                sending[graph.rank[sent.source]] += sent.arrival_ns - sent.start_ns
    total = [sum(times) for times in zip(busy, reducing, stepping, strict=True)]
    iteration = max(done.end_ns for done in finished)
    used = [time for time in total if time]
    idle = 1 - sum(used) / (iteration * len(used)) if iteration and used else 0.0
    prediction = Prediction(
        iteration_ns=iteration,
        bottleneck_ns=max(total),
        bubble=min(1.0, max(0.0, idle)),
        depth=depth(plan),
        communication_ns=max(sending),
        all_reduce_ns=max(reducing),
        optimizer_ns=max(stepping),
        peak_memory=peak_memory(plan),
        lower_bound_ns=lower_bound_ns,
    )
    return plan.model_copy(update={"prediction": prediction})


def _is_credit(graph: TaskGraph, sent: Sent) -> bool:
    """A forward of a consumer that releases a forward of its producer carries no tensors."""
    stages = (graph.stage[sent.source], graph.stage[sent.target])
    return sent.nbytes == 0 and all(
        (edge.source, edge.target) != stages
        and not ((edge.target, edge.source) == stages and graph.task(sent.source).kind == "B")
        for edge in graph.problem.edges
    )
