"""Why no plan fits, and the nearest change that would make one fit."""

from __future__ import annotations

from graphpipe.cost.cluster import Cluster
from graphpipe.errors import InfeasibleError
from graphpipe.plan.plan import Plan
from graphpipe.planner.explore import Search
from graphpipe.planner.fitting import Outcome
from graphpipe.planner.seeds import Freedom
from graphpipe.planner.space import Space
from graphpipe.units import format_bytes


def check_sizes(space: Space) -> None:
    """Refuses at once what no plan can hold.

    Raises:
        InfeasibleError: if one unit's parameters exceed the largest device, or all together
            exceed all devices.
    """
    units = space.units
    largest = max(space.memory)
    for u, need in enumerate(units.static_bytes):
        if need > largest:
            op = max(
                units.members[u],
                key=lambda i: sum(
                    units.graph.parameter_by_name[name].nbytes
                    for name in units.graph.ops[i].parameters
                ),
            )
            raise InfeasibleError(
                "An op alone is larger than any device",
                where=f"op {units.graph.ops[op].name!r}",
                expected=f"at most {format_bytes(largest)}",
                got=f"{format_bytes(need)} of parameters, gradients and optimizer state",
                fix=f"Use devices of {format_bytes(need)}, or an optimizer with less state",
            )
    every = tuple(range(len(units)))
    need, have = units.facts(every).static, sum(space.memory)
    if need > have:
        count = -(-need // max(space.memory))
        raise InfeasibleError(
            "The model does not fit into the cluster",
            expected=f"at most {format_bytes(have)} on {len(space.memory)} devices",
            got=f"{format_bytes(need)} of parameters, gradients and optimizer state",
            fix=f"Use at least {count:.0f} such devices, or an optimizer with less state",
        )


def no_plan(space: Space, freedom: Freedom, outcome: Outcome) -> InfeasibleError:
    """The error for a search that found nothing: names the device that lacks least.

    Args:
        space: The search space.
        freedom: What the search was allowed.
        outcome: How it ended.
    """
    if outcome.over is not None:
        return _over_at_peak(space, freedom, outcome.over)
    if outcome.lacking is None:
        return InfeasibleError(
            "No plan is possible within the given choices",
            fix="Allow more micro-batch sizes, copies or stages",
        )
    layout, value = outcome.lacking.layout, outcome.lacking.estimate
    worst = max(range(len(value.lack)), key=lambda p: value.lack[p])
    ranks = space.part_ranks(layout)[worst]
    rank = min(ranks, key=lambda r: space.memory[r])
    room = space.memory[rank]
    structure = space.structure(layout.assign, layout.merged)
    assert structure is not None
    units = [u for s in structure.of_part[worst] for u in structure.stages[s]]
    return InfeasibleError(
        "No plan fits the memory; in the nearest one a device lacks room for "
        f"{space.units.name(units)}",
        where=f"device {rank} ({space.cluster.devices[rank].kind})",
        expected=f"at most {format_bytes(room)}",
        got=f"{format_bytes(room - space.margin + value.lack[worst])} with micro-batches of "
        f"{max(1, layout.batch_of(worst) // layout.replicas[worst])} samples",
        fix=_remedy(space, freedom, value.lack[worst]),
    )


def _over_at_peak(space: Space, freedom: Freedom, nearest: Plan) -> InfeasibleError:
    """For a plan that fits by the estimate and exceeds a device when it is simulated."""
    assert nearest.prediction is not None
    peaks = nearest.prediction.peak_memory
    rank = max(range(len(peaks)), key=lambda r: peaks[r] - space.memory[r])
    stages = [stage for stage in nearest.stages if rank in stage.devices]
    lack = peaks[rank] - space.memory[rank]
    return InfeasibleError(
        "No plan fits the memory; in the nearest one the peak of a device, messages under way "
        f"included, is too high for {' and '.join(stage.name for stage in stages)}",
        where=f"device {rank} ({space.cluster.devices[rank].kind})",
        expected=f"at most {format_bytes(space.memory[rank])}",
        got=f"{format_bytes(peaks[rank])} with micro-batches of "
        f"{min(stage.micro_batch for stage in stages)} samples",
        fix=_remedy(space, freedom, lack),
    )


def _remedy(space: Space, freedom: Freedom, lack: float) -> str:
    """The nearest change that makes a plan fit by the estimate: each is tried."""
    if freedom.recompute is False and _fits(space, freedom._replace(recompute="auto")):
        return "It fits with recomputation: allow recompute='auto'"
    if freedom.micro_batches is not None:
        for size in range(min(freedom.micro_batches) // 2, 0, -1):
            if space.batch_size % size == 0 and _fits(
                space, freedom._replace(micro_batches=(size,))
            ):
                return f"It fits with micro-batches of {size} samples: allow that size"
    more = 1
    while more <= max(4, 4 * space.cluster.world_size) and not freedom.parts:
        wider = _with_more_devices(space, more)
        if _fits(wider, freedom._replace(copies=_COPIES)):
            plural = "s" if more > 1 else ""
            return f"It fits with {more} more device{plural} like the last one"
        more *= 2
    return (
        f"Use devices with {format_bytes(lack)} more, an optimizer with less state, "
        "or a smaller mini-batch"
    )


_COPIES = (1,)
_TRIED = 150
"""Budget of a search that only has to find out whether something fits."""


def _fits(space: Space, freedom: Freedom) -> bool:
    return Search(space, freedom, budget=_TRIED).run() is not None


def _with_more_devices(space: Space, more: int) -> Space:
    """The space with ``more`` devices like the last one, filling nodes like the largest."""
    cluster = space.cluster
    last = cluster.devices[-1]
    per_node = max(len(node) for node in cluster.nodes)
    room = per_node - sum(device.node == last.node for device in cluster.devices)
    extra = [
        last.model_copy(
            update={"node": last.node if i < room else last.node + 1 + (i - room) // per_node}
        )
        for i in range(more)
    ]
    nodes = 1 + max(device.node for device in (*cluster.devices, *extra))
    links = cluster.node_links
    wider = Cluster(
        name=cluster.name,
        devices=(*cluster.devices, *extra),
        network=cluster.network,
        node_links=(*links, *(None,) * (nodes - len(links))) if links else (),
    )
    memory = (*space.memory, *(space.memory[-1],) * more)
    return Space(
        space.units,
        wider,
        space.batch_size,
        memory,
        space.fixed,
        space.pin,
        margin=space.margin,
    )
