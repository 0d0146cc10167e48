"""Why no plan fits, and the nearest change that would make one fit."""

from __future__ import annotations

from graphpipe.errors import InfeasibleError
from graphpipe.planner.estimate import estimate
from graphpipe.planner.layout import Layout
from graphpipe.planner.seeds import Seed
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


def no_plan(space: Space, nearest: Seed | None, recompute: bool | str) -> InfeasibleError:
    """The error for a search that found nothing: names the device that lacks least.

    Args:
        space: The search space.
        nearest: The layout that lacked least, if any was legal.
        recompute: What the search was allowed.
    """
    if nearest is None:
        return InfeasibleError(
            "No plan is possible within the given choices",
            fix="Allow more micro-batch sizes, copies or stages",
        )
    layout, value = nearest.layout, nearest.estimate
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
        got=f"{format_bytes(room + value.lack[worst])} with micro-batches of "
        f"{layout.batch_of(worst) // layout.replicas[worst]} samples",
        fix=_remedy(space, layout, worst, value.lack[worst], recompute),
    )


def _remedy(space: Space, layout: Layout, worst: int, lack: float, recompute: bool | str) -> str:
    if recompute is False:
        flags = (True,) * len(layout.replicas)
        value = estimate(space, layout._replace(recompute=flags))
        if value is not None and value.lacking <= 0:
            return "It fits with recomputation: allow recompute='auto'"
    batch = layout.micro_batch
    while batch > 1 and not space.any_whole:
        batch //= 2
        part_batch = tuple(max(1, q * batch // layout.micro_batch) for q in layout.part_batch)
        value = estimate(space, layout._replace(micro_batch=batch, part_batch=part_batch))
        if value is not None and value.lacking <= 0:
            return f"It fits with micro-batches of {batch} samples: allow that size"
    share = lack / max(space.memory)
    more = max(1, round(share * len(layout.replicas) + 0.5))
    return (
        f"Use devices with {format_bytes(lack)} more, about {more} more device"
        f"{'s' if more > 1 else ''}, an optimizer with less state, or a smaller mini-batch"
    )
