"""What a timeline shows, in sentences."""

from __future__ import annotations

from graphpipe.plan.plan import Plan
from graphpipe.plan.text import ranks_text
from graphpipe.simulate.timeline import Timeline
from graphpipe.simulate.usage import DeviceUse, bubble, busiest, device_uses
from graphpipe.units import format_bytes, format_count, format_ns, format_percent


def describe(plan: Plan, timeline: Timeline, *, bound: bool = True) -> tuple[str, ...]:
    """Sentences on speed, bottleneck, bubble, messages, memory and what is left to gain.

    Args:
        plan: The plan.
        timeline: One iteration of it, predicted or measured.
        bound: Say how far the plan is above the lower bound that it records.
    """
    uses = device_uses(plan, timeline)
    sentences = [_speed(plan, timeline), _bottleneck(plan, timeline, uses)]
    sentences.append(_bubble(uses, timeline.iteration_ns))
    sentences += _messages(plan, timeline)
    sentences += _memory(plan, timeline)
    if bound:
        sentences += _lower_bound(plan, timeline)
    sentences += _idle(plan)
    return tuple(sentences)


def describe_measured(plan: Plan, predicted: Timeline, measured: Timeline) -> tuple[str, ...]:
    """How far the prediction was from what was measured, and what held it up."""
    uses = device_uses(plan, measured)
    return (
        _error(predicted, measured),
        _bottleneck(plan, measured, uses),
        _bubble(uses, measured.iteration_ns),
    )


def source_of(timeline: Timeline) -> str:
    """Where a timeline that is set beside the predicted one comes from."""
    return "measured" if timeline.network == "measured" else "emulated"


def _error(predicted: Timeline, measured: Timeline) -> str:
    if not measured.iteration_ns:
        return f"The {source_of(measured)} iteration has no duration."
    error = predicted.iteration_ns / measured.iteration_ns - 1
    direction = "above" if error > 0 else "below"
    return (
        f"Predicted {format_ns(predicted.iteration_ns)}, {source_of(measured)} "
        f"{format_ns(measured.iteration_ns)}: the prediction is "
        f"{format_percent(abs(error))} {direction} it."
    )


def _speed(plan: Plan, timeline: Timeline) -> str:
    how = "took" if timeline.network == "measured" else "takes"
    text = f"One iteration {how} {format_ns(timeline.iteration_ns)}"
    text += f" for {format_count(plan.batch_size, 'sample')}"
    if timeline.iteration_ns:
        rate = plan.batch_size / timeline.iteration_ns * 1e9
        text += f": {rate:,.0f} samples a second" if rate >= 100 else f": {rate:.3g} a second"
    return text + "."


def _bottleneck(plan: Plan, timeline: Timeline, uses: tuple[DeviceUse, ...]) -> str:
    worst = busiest(uses)
    names = _listed([f"{stage} ({plan.stages[stage].name})" for stage in worst.stages])
    plural = "s" if len(worst.stages) > 1 else ""
    share = worst.busy_ns / timeline.iteration_ns if timeline.iteration_ns else 0.0
    used = [use.busy_ns for use in uses if use.stages]
    text = (
        f"The bottleneck is device {worst.rank}, which works for {format_ns(worst.busy_ns)} of it "
        f"({format_percent(share)}) on stage{plural} {names}: {_kinds(worst)}."
    )
    if len(used) > 1:
        text += f" The average device in use works for {format_ns(sum(used) / len(used))}."
    return text


def _kinds(use: DeviceUse) -> str:
    kinds = {
        "forward": use.forward_ns,
        "recompute": use.recompute_ns,
        "backward": use.backward_ns,
        "all-reduce": use.all_reduce_ns,
        "optimizer": use.optimizer_ns,
    }
    return ", ".join(f"{name} {format_ns(time)}" for name, time in kinds.items() if time)


def _listed(items: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([*([", ".join(items[:-1])] if items[1:] else []), *items[-1:]])


def _bubble(uses: tuple[DeviceUse, ...], iteration_ns: int) -> str:
    used = [use for use in uses if use.stages]
    total = len(used) * iteration_ns
    if not total:
        return "No device works."
    fill = sum(use.fill_ns for use in used) / total
    wait = sum(use.wait_ns for use in used) / total
    drain = sum(use.drain_ns for use in used) / total
    return (
        f"The bubble is {format_percent(bubble(uses, iteration_ns))}: so much of the time of the "
        f"devices in use is idle, {format_percent(fill)} before a device's first task, "
        f"{format_percent(wait)} between its tasks and {format_percent(drain)} after its last."
    )


def _messages(plan: Plan, timeline: Timeline) -> list[str]:
    if not timeline.transfers:
        return []
    devices = plan.cluster.devices
    between = 0
    sent: dict[tuple[int, int], tuple[int, int]] = {}
    for transfer in timeline.transfers:
        edge = plan.edges[transfer.edge]
        nbytes, spent = sent.get((edge.source, edge.target), (0, 0))
        took = transfer.end_ns - transfer.start_ns
        sent[edge.source, edge.target] = (nbytes + transfer.nbytes, spent + took)
        if devices[transfer.source].node != devices[transfer.target].node:
            between += transfer.nbytes
    total = sum(nbytes for nbytes, _ in sent.values())
    (source, target), (nbytes, spent) = max(sent.items(), key=lambda item: (item[1][1], item[0]))
    text = (
        f"Stages exchange {format_bytes(total)} in "
        f"{format_count(len(timeline.transfers), 'message')}"
    )
    if len({device.node for device in devices}) > 1:
        text += f", {format_bytes(between)} of it between nodes"
    return [
        f"{text}; most of the time goes to {source} ({plan.stages[source].name}) -> {target} "
        f"({plan.stages[target].name}): {format_bytes(nbytes)} in {format_ns(spent)}."
    ]


def _memory(plan: Plan, timeline: Timeline) -> list[str]:
    if not timeline.peak_memory:
        return []
    capacity = [device.memory_bytes for device in plan.cluster.devices]
    shares = [peak / limit for peak, limit in zip(timeline.peak_memory, capacity, strict=True)]
    fullest = max(range(len(shares)), key=lambda rank: (shares[rank], -rank))
    static = plan.static_bytes(fullest)
    sentences = [
        f"Memory is tightest on device {fullest}: {format_bytes(timeline.peak_memory[fullest])} "
        f"of {format_bytes(capacity[fullest])} ({format_percent(shares[fullest])}) at its peak, "
        f"{format_bytes(static)} of it parameters, gradients and optimizer state."
    ]
    recomputed = [f"{s} ({stage.name})" for s, stage in enumerate(plan.stages) if stage.recompute]
    if recomputed:
        plural = "s" if len(recomputed) > 1 else ""
        sentences.append(f"To save memory, stage{plural} {_listed(recomputed)} recompute.")
    return sentences


def _idle(plan: Plan) -> list[str]:
    idle = plan.idle_devices
    if not idle:
        return []
    return [
        f"{len(idle)} of {format_count(plan.world_size, 'device')} stay idle ({ranks_text(idle)}): "
        "the search found nothing faster that uses them."
    ]


def _lower_bound(plan: Plan, timeline: Timeline) -> list[str]:
    bound = plan.prediction.lower_bound_ns if plan.prediction is not None else 0
    if not bound or timeline.network == "measured":
        return []
    gap = timeline.iteration_ns / bound - 1
    return [
        f"No plan for this input can take less than {format_ns(bound)}; "
        f"this one is {format_percent(gap)} above that bound."
    ]
