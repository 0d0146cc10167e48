"""``explain``: why a plan takes what it takes, in words."""

from __future__ import annotations

from graphpipe.cost.table import CostTable
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.planner.infeasible import bytes_text
from graphpipe.planner.lower_bound import LowerBound, explain_gap, lower_bound
from graphpipe.simulate.simulator import simulate
from graphpipe.simulate.timeline import Timeline


def explain(plan: Plan, graph: ModelGraph | None = None, costs: CostTable | None = None) -> str:
    """The bottleneck, the bubble, communication, memory, and how far from the bound it is.

    Args:
        plan: The plan; it is simulated again.
        graph: Its graph. With ``costs`` it allows to say what the gap to the lower bound is
            made of.
        costs: Its costs.
    """
    timeline = simulate(plan)
    lines = [*_bottleneck(plan, timeline), *_waiting(plan, timeline), *_traffic(plan, timeline)]
    lines += _memory(plan, timeline)
    if graph is not None and costs is not None:
        bound = lower_bound(graph, costs, plan.cluster, plan.batch_size)
        lines += _gap(plan, timeline, bound)
    elif plan.prediction is not None and plan.prediction.lower_bound_ns:
        least = plan.prediction.lower_bound_ns
        share = timeline.iteration_ns / least - 1
        lines.append(f"No plan can take less than {_ms(least)}: this one is {share:.1%} above.")
    lines += list(plan.notes)
    return "\n".join(lines)


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.4g} ms"


def _by_kind(plan: Plan, timeline: Timeline) -> dict[str, list[int]]:
    """Nanoseconds of each rank by kind of event."""
    spent = {kind: [0] * plan.world_size for kind in ("F", "B", "all_reduce", "optimizer")}
    for event in timeline.events:
        spent[event.kind][event.rank] += event.end_ns - event.start_ns
    return spent


def _bottleneck(plan: Plan, timeline: Timeline) -> list[str]:
    busy = timeline.busy_ns
    worst = max(range(plan.world_size), key=lambda rank: busy[rank])
    spent = _by_kind(plan, timeline)
    used = [rank for rank in range(plan.world_size) if plan.stages_of_device[rank]]
    average = sum(busy[rank] for rank in used) / max(1, len(used))
    names = ", ".join(repr(plan.stages[s].name) for s in plan.stages_of_device[worst])
    kinds = {"F": "forward", "B": "backward", "all_reduce": "all-reduce", "optimizer": "optimizer"}
    parts = ", ".join(f"{name} {_ms(spent[kind][worst])}" for kind, name in kinds.items()
                      if spent[kind][worst])  # fmt: skip
    out = [
        f"Iteration {_ms(timeline.iteration_ns)} for {plan.batch_size} samples.",
        f"Bottleneck: device {worst} with {names} works {_ms(busy[worst])} ({parts}); "
        f"the average device {_ms(average)}.",
    ]
    if plan.idle_devices:
        out.append(
            f"{len(plan.idle_devices)} of {plan.world_size} devices are idle "
            f"({', '.join(map(str, plan.idle_devices[:16]))}"
            f"{', ...' if len(plan.idle_devices) > 16 else ''}): using them would not be faster."
        )
    return out


def _waiting(plan: Plan, timeline: Timeline) -> list[str]:
    first, last = timeline.iteration_ns, 0
    busy = timeline.busy_ns
    worst = max(range(plan.world_size), key=lambda rank: busy[rank])
    for event in timeline.events:
        if event.rank == worst and event.kind in ("F", "B"):
            first, last = min(first, event.start_ns), max(last, event.end_ns)
    inside = sum(
        event.end_ns - event.start_ns
        for event in timeline.events
        if event.rank == worst and event.kind in ("F", "B")
    )
    return [
        f"Bubble {timeline.bubble:.1%} of the devices in use. The bottleneck waits {_ms(first)} "
        f"for its first micro-batch, {_ms(max(0, last - first - inside))} between tasks, and the "
        f"iteration ends {_ms(timeline.iteration_ns - last)} after its last task."
    ]


def _traffic(plan: Plan, timeline: Timeline) -> list[str]:
    sent: dict[tuple[int, int], list[int]] = {}
    between = 0
    devices = plan.cluster.devices
    for transfer in timeline.transfers:
        edge = plan.edges[transfer.edge]
        row = sent.setdefault((edge.source, edge.target), [0, 0])
        row[0] += transfer.nbytes
        row[1] += transfer.end_ns - transfer.start_ns
        if devices[transfer.source].node != devices[transfer.target].node:
            between += transfer.nbytes
    if not sent:
        return ["Nothing passes between devices but the reduction of gradients."]
    total = sum(row[0] for row in sent.values())
    (source, target), row = max(sent.items(), key=lambda item: (item[1][1], item[0]))
    return [
        f"Communication: {bytes_text(total)} in one iteration, {bytes_text(between)} of it between "
        f"nodes; most time goes to {plan.stages[source].name!r} -> {plan.stages[target].name!r}: "
        f"{bytes_text(row[0])} in {_ms(row[1])}."
    ]


def _memory(plan: Plan, timeline: Timeline) -> list[str]:
    if not timeline.peak_memory:
        return []
    share = [
        peak / device.memory_bytes
        for peak, device in zip(timeline.peak_memory, plan.cluster.devices, strict=True)
    ]
    worst = max(range(plan.world_size), key=lambda rank: share[rank])
    recomputed = [stage.name for stage in plan.stages if stage.recompute]
    out = [
        f"Memory: device {worst} is fullest, {bytes_text(timeline.peak_memory[worst])} of "
        f"{bytes_text(plan.cluster.devices[worst].memory_bytes)} ({share[worst]:.0%}), "
        f"{bytes_text(plan.static_bytes(worst))} of it parameters, gradients and optimizer state."
    ]
    if recomputed:
        out.append(f"Recomputed to save memory: {', '.join(map(repr, recomputed))}.")
    return out


def _gap(plan: Plan, timeline: Timeline, bound: LowerBound) -> list[str]:
    spent = _by_kind(plan, timeline)
    compute = [(f + b) / 1e9 for f, b in zip(spent["F"], spent["B"], strict=True)]
    gap = explain_gap(
        bound,
        timeline.iteration_ns / 1e9,
        compute,
        recompute_seconds=_recompute_seconds(plan, timeline),
        all_reduce_seconds=[x / 1e9 for x in spent["all_reduce"]],
        optimizer_seconds=[x / 1e9 for x in spent["optimizer"]],
    )
    parts = {
        "small micro-batches": gap.efficiency,
        "recomputation": gap.recompute,
        "all-reduce": gap.all_reduce,
        "optimizer": gap.optimizer,
        "imbalance": gap.imbalance,
        "bubble": gap.bubble,
    }
    text = ", ".join(f"{name} {_ms(x * 1e9)}" for name, x in parts.items() if abs(x) >= 1e-9)
    share = timeline.iteration_ns / max(1, bound.nanoseconds) - 1
    return [
        f"No plan can take less than {_ms(bound.nanoseconds)} ({bound.binding.replace('_', ' ')}): "
        f"this one is {share:.1%} above. Above the ideal work of a device, "
        f"{_ms(bound.ideal_work / plan.world_size * 1e9)}, lie {text}."
    ]


def _recompute_seconds(plan: Plan, timeline: Timeline) -> float:
    total = 0
    for event in timeline.events:
        if event.kind == "F" and plan.stages[event.stage].recompute:
            total += event.end_ns - event.start_ns
    return total / 1e9
