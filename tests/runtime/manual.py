"""Plans written by hand for tests: which ops go where, with which micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphpipe.cost.cluster import Cluster, Device
from graphpipe.graph.cut import partition_ops
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.assemble import StageChoice, assemble
from graphpipe.plan.plan import Plan


@dataclass
class Part:
    """A stage: what belongs to it (names of ops, paths of modules), and how it runs."""

    members: str
    micro_batch: int = 1
    devices: tuple[int, ...] = ()
    replicas: int = 1
    recompute: bool = False


def manual_plan(
    graph: ModelGraph,
    parts: Sequence[Part],
    *,
    batch_size: int,
    copies: int = 1,
    builder: str = "auto",
    slack: int = 0,
    world_size: int | None = None,
) -> Plan:
    """A plan with these stages.

    An op that no part names goes to the last of the stages that it reads from (the first
    stage if it reads none); a group goes to the last of its ops' stages. Devices default to
    one of its own for each replica, copies after one another.
    """
    owner = owners(graph, [part.members for part in parts])
    used = 0
    places: list[tuple[int, ...]] = []
    for part in parts:
        places.append(part.devices or tuple(range(used, used + part.replicas)))
        used = max(used, max(places[-1]) + 1)
    choices = [
        StageChoice(
            ops=tuple(name for name in partition_ops(graph) if owner[name] == i),
            micro_batch=part.micro_batch,
            replicas=part.replicas,
            devices=tuple(rank + copy * used for copy in range(copies) for rank in place),
            slack=slack,
            recompute=part.recompute,
            name=part.members.split()[0],
        )
        for i, (part, place) in enumerate(zip(parts, places, strict=True))
    ]
    world = world_size or used * copies
    cluster = Cluster(devices=tuple(Device(kind="cpu", memory_bytes=2**40) for _ in range(world)))
    return assemble(
        graph, None, cluster, choices, batch_size=batch_size, copies=copies, builder=builder
    )


def owners(graph: ModelGraph, parts: Sequence[str]) -> dict[str, int]:
    """By op, the part that it belongs to."""
    owner: dict[str, int] = {}
    for op in graph.ops:
        # The exact name of an op wins over the module that it is in.
        exact = [i for i, members in enumerate(parts) if op.name in members.split()]
        named = [
            i
            for i, members in enumerate(parts)
            for member in members.split()
            if f"{op.module}.".startswith(f"{member}.")
        ]
        before = [owner[name] for name in op.inputs if name in owner]
        owner[op.name] = (exact or named or [max(before, default=0)])[0]
    last: dict[int, int] = {}
    for op in graph.ops:
        if op.group is not None:
            last[op.group] = max(last.get(op.group, 0), owner[op.name])
    return {op.name: owner[op.name] if op.group is None else last[op.group] for op in graph.ops}
