"""Small graphs with costs, made from numbers, for the tests of the planner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from graphpipe.cost.cluster import Cluster, Device, Network
from graphpipe.cost.published.build import KIND, GraphDefaults, GraphFile, Node, build
from graphpipe.cost.table import ParameterMemory
from graphpipe.planner.unit_graph import UnitGraph, build_units

MS = 1e-3


def graph_of(
    nodes: Sequence[Node],
    edges: Iterable[tuple[str, str]],
    *,
    memory: ParameterMemory | None = None,
) -> GraphFile:
    """Graph and costs of these nodes."""
    return build(
        "synthetic",
        nodes,
        list(edges),
        where="test",
        parameter_memory=memory or ParameterMemory(1.0, 1.0, 2.0),
        defaults=GraphDefaults(),
    )


def towers(branches: int, layers: int, trunk: int, *, forward_ms: float = 1.0) -> GraphFile:
    """Equal branches joined by a trunk; backwards take twice as long as forwards."""
    nodes, edges = [], []
    for branch in range(branches):
        for layer in range(layers):
            nodes.append(_layer(f"b{branch}.{layer}", forward_ms))
            if layer:
                edges.append((f"b{branch}.{layer - 1}", f"b{branch}.{layer}"))
    for layer in range(trunk):
        nodes.append(_layer(f"t.{layer}", forward_ms))
        above = [f"t.{layer - 1}"] if layer else [f"b{i}.{layers - 1}" for i in range(branches)]
        edges.extend((name, f"t.{layer}") for name in above)
    return graph_of(nodes, edges)


def _layer(name: str, forward_ms: float) -> Node:
    return Node(
        id=name,
        forward=forward_ms * MS,
        backward=2 * forward_ms * MS,
        parameter_bytes=4e6,
        saved_bytes=1e6,
        output_bytes=1e5,
    )


def random_graph(random: Random, count: int, *, frozen: bool = False) -> GraphFile:
    """Up to ``count`` nodes with random edges and costs; with ``frozen`` some have no backward."""
    nodes = []
    for i in range(count):
        forward = random.choice([0.0, 1.0, 1.0, 2.0, 3.0]) * random.uniform(0.5, 1.0) * MS
        still = frozen and random.random() < 0.3
        nodes.append(
            Node(
                id=f"n{i}",
                forward=forward,
                backward=0.0 if still else forward * random.uniform(1.0, 3.0) + 1e-6,
                trainable=not still,
                parameter_bytes=float(random.choice([0, 1 << 20, 1 << 24])),
                saved_bytes=float(random.choice([0, 1 << 18])),
                output_bytes=float(random.choice([0, 1 << 16, 1 << 20])),
            )
        )
    edges = [(f"n{a}", f"n{b}") for b in range(count) for a in range(b) if random.random() < 0.45]
    return graph_of(nodes, edges)


def cluster_of(
    devices: int,
    *,
    per_node: int | None = None,
    memory_bytes: float = 2.0**40,
    bandwidth: float | None = None,
    across: float | None = None,
    latency: float = 0.0,
) -> Cluster:
    """Equal devices; ``bandwidth`` inside a node, ``across`` (by default the same) between."""
    size = per_node or devices
    return Cluster(
        devices=tuple(
            Device(kind=KIND, memory_bytes=int(memory_bytes), node=rank // size)
            for rank in range(devices)
        ),
        network=Network(
            intra_node_bandwidth=bandwidth,
            inter_node_bandwidth=across if across is not None else bandwidth,
            intra_node_latency=latency,
            inter_node_latency=latency,
        ),
    )


def units_of(file: GraphFile, *, parts: int = 10**6) -> UnitGraph:
    """One unit per op, unless ``parts`` is smaller."""
    return build_units(file.graph, file.costs, [KIND], micro_batch=1, parts=parts)
