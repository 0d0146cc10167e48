"""The JSON of the DNN-partitioning project (Tarnawski et al., NeurIPS 2020).

Inference graphs have one node per op or layer. Training graphs also have backward nodes;
each is merged into the forward node that it belongs with, so that every op has a forward
and a backward time:

- into the forward node of its colour class whose name begins its own (``MatMul4`` for
  ``MatMul4_Grad/Gemm``), else into the slowest forward node of the class;
- a class without a forward node, or a node without a class, goes with the latest forward
  node that it, or a backward node before it, reads.

Nodes of one colour class must share a device: they become a group. Latencies are those of
the accelerator, in milliseconds for the batch that was profiled, which counts as one
sample. ``size`` is memory on the accelerator; of a backward node it stays there as well.

The ``cost`` of an edge is the time to move the *source's* output between accelerator and
host, in seconds or (operator graphs) in milliseconds. Both are bytes over 2^31 bytes per
second, from which the bytes are recovered; the edges' ``size`` tells which unit it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import networkx as nx

from graphpipe.cost.published.build import (
    MOST_DEVICES,
    GraphDefaults,
    GraphFile,
    Node,
    build,
    memory_limit,
)
from graphpipe.cost.published.fields import Fields
from graphpipe.cost.table import ParameterMemory
from graphpipe.errors import FileFormatError

HOST_BANDWIDTH = float(2**31)
"""Bytes per second between accelerator and host behind the costs of the edges."""
CostUnit = Literal["s", "ms"]


class _Raw(NamedTuple):
    id: str
    name: str
    seconds: float
    size: float
    backward: bool
    color: str | None


class _Edge(NamedTuple):
    source: str
    target: str
    cost: float
    size: float


def read_dnn_partitioning(
    data: Fields,
    *,
    name: str,
    cost_unit: CostUnit | None = None,
    parameter_memory: ParameterMemory | None = None,
) -> GraphFile:
    """Reads an inference or training graph.

    Args:
        data: The file's object.
        name: Name of the graph.
        cost_unit: Unit of the edges' ``cost``; None: found from the edges' ``size``, else
            seconds.
        parameter_memory: Factors for weights, gradients and optimizer state. The default
            counts ``size`` once, as the project does.

    Raises:
        FileFormatError: naming id and field.
    """
    notes: list[str] = []
    raw = [_raw(item) for item in data.objects("nodes", "node")]
    edges = [
        _Edge(
            item.identity("sourceId"),
            item.identity("destId"),
            item.number("cost"),
            item.number("size", default=0.0),
        )
        for item in data.objects("edges", "edge")
    ]
    unit = cost_unit or _unit_of(edges)
    bandwidth = HOST_BANDWIDTH * (1e-3 if unit == "ms" else 1.0)
    output: dict[str, float] = {}
    for edge in edges:
        output[edge.source] = max(output.get(edge.source, 0.0), edge.cost * bandwidth)
    forward = [node for node in raw if not node.backward]
    if raw and not forward:
        raise FileFormatError("Every node is a backward node", where=f"{data.where}, nodes")
    full = _graph(raw, edges, data.where)
    order = {node: i for i, node in enumerate(nx.topological_sort(full))}
    owner = _owners(raw, full, order)
    nodes = _merged(raw, owner, output)
    pairs = [
        (edge.source, edge.target)
        for edge in edges
        if edge.source in nodes and edge.target in nodes
    ]
    _group_classes(forward, nodes, pairs, notes)
    unsupported = sum(not flag for flag in _supported(data))
    if unsupported:
        notes.append(f"{unsupported} nodes are marked as unfit for the accelerator; read as fit")
    return build(
        name,
        list(nodes.values()),
        pairs,
        where=data.where,
        parameter_memory=parameter_memory or ParameterMemory(1.0, 0.0, 0.0),
        defaults=GraphDefaults(
            devices=data.count("maxFPGAs", largest=MOST_DEVICES),
            memory_bytes=memory_limit(data.positive("maxSizePerFPGA")),
            bandwidth=HOST_BANDWIDTH,
            micro_batch=1,
        ),
        notes=notes,
    )


def _raw(item: Fields) -> _Raw:
    identity = item.identity("id")
    place = f"{item.where.rsplit(', nodes[', 1)[0]}, node '{identity}'"
    node = Fields(item.values, place)
    node.number("cpuLatency", default=0.0)
    return _Raw(
        id=identity,
        name=node.text("name"),
        seconds=node.number("fpgaLatency") / 1e3,
        size=node.number("size"),
        backward=node.flag("isBackwardNode"),
        color=node.identity("colorClass") if "colorClass" in node.values else None,
    )


def _supported(data: Fields) -> list[bool]:
    return [
        item.flag("supportedOnFpga")
        for item in data.objects("nodes", "node")
        if "supportedOnFpga" in item.values
    ]


def _unit_of(edges: Sequence[_Edge]) -> CostUnit:
    """Milliseconds if the costs are a thousand times what the edges' sizes take in seconds."""
    ratios = [
        edge.cost / (edge.size / HOST_BANDWIDTH) for edge in edges if edge.cost > 0 < edge.size
    ]
    return "ms" if ratios and statistics.median(ratios) > 30 else "s"


def _graph(raw: Sequence[_Raw], edges: Sequence[_Edge], where: str) -> nx.DiGraph[str]:
    """The graph of all nodes, forward and backward; ``build`` checks the rest of its structure."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    for node in raw:
        if node.id in graph:
            raise FileFormatError("An id is there twice", where=f"{where}, node '{node.id}'")
        graph.add_node(node.id)
    for edge in edges:
        for end in (edge.source, edge.target):
            if end not in graph:
                raise FileFormatError(
                    f"An edge names the unknown node '{end}'",
                    where=f"{where}, edge '{edge.source}' -> '{edge.target}'",
                )
        graph.add_edge(edge.source, edge.target)
    if nx.is_directed_acyclic_graph(graph):
        return graph
    # find_cycle walks in quadratic time where there is none: show it only knots.
    knots = (part for part in nx.strongly_connected_components(graph) if len(part) > 1)
    knot = next(knots, None) or {node for node in graph if graph.has_edge(node, node)}
    cycle = nx.find_cycle(graph.subgraph(knot))
    ids = " -> ".join(f"'{source}'" for source, *_ in cycle[:8])
    raise FileFormatError(f"The graph has a cycle: {ids}", where=f"{where}, edges")


def _owners(
    raw: Sequence[_Raw], graph: nx.DiGraph[str], order: Mapping[str, int]
) -> dict[str, str]:
    """For every backward node the forward node that it belongs with (see the module)."""
    forward = {node.id: node for node in raw if not node.backward}
    first = min(forward, key=order.__getitem__, default="")
    classes: dict[str, list[_Raw]] = {}
    for node in raw:
        if not node.backward and node.color is not None:
            classes.setdefault(node.color, []).append(node)
    owner: dict[str, str] = {}
    by_class: dict[str, str] = {}
    backward = sorted((node for node in raw if node.backward), key=lambda node: order[node.id])
    for node in backward:
        members = classes.get(node.color, []) if node.color is not None else []
        if members:
            named = [item for item in members if _begins(item.name, node.name)]
            owner[node.id] = max(named or members, key=lambda item: (item.seconds, item.id)).id
            continue
        if node.color is not None and node.color in by_class:
            owner[node.id] = by_class[node.color]
            continue
        read = [owner.get(source, source) for source in graph.predecessors(node.id)]
        found = max(read, key=order.__getitem__, default=first)
        owner[node.id] = found
        if node.color is not None:
            by_class[node.color] = found
    return owner


def _begins(forward: str, backward: str) -> bool:
    """Whether the backward node is named after the forward node: ``A``, ``A_Grad/...``."""
    rest = backward[len(forward) :]
    return bool(forward) and backward.startswith(forward) and not rest[:1].isalnum()


def _merged(
    raw: Sequence[_Raw], owner: Mapping[str, str], output: Mapping[str, float]
) -> dict[str, Node]:
    trained = set(owner.values())
    nodes = {
        node.id: Node(
            id=node.id,
            name=node.name,
            forward=node.seconds,
            parameter_bytes=node.size,
            trainable=node.id in trained,
            output_bytes=output.get(node.id, 0.0),
        )
        for node in raw
        if not node.backward
    }
    for node in raw:
        if node.backward:
            target = nodes[owner[node.id]]
            target.backward += node.seconds
            target.constant_bytes += node.size
    return nodes


def _group_classes(
    forward: Sequence[_Raw],
    nodes: Mapping[str, Node],
    pairs: Sequence[tuple[str, str]],
    notes: list[str],
) -> None:
    """Marks each colour class as a group, unless a path leaves it and comes back.

    Classes that only together form such a path (a1 -> b1 and b2 -> a2) become one group.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from(pairs)
    place = {node: i for i, node in enumerate(nx.topological_sort(graph))}
    classes: dict[str, list[str]] = {}
    for node in forward:
        if node.color is not None:
            classes.setdefault(node.color, []).append(node.id)
    whole: dict[str, str] = {}
    for color, members in classes.items():
        if len(members) < 2:
            continue
        if _leaves_and_returns(graph, members, place):
            notes.append(
                f"colour class {color} is not kept together: other nodes lie between its "
                f"{len(members)} members"
            )
        else:
            whole.update(dict.fromkeys(members, f"class {color}"))
    contracted: nx.DiGraph[str] = nx.DiGraph()
    contracted.add_nodes_from(whole.get(node, node) for node in nodes)
    contracted.add_edges_from((whole.get(a, a), whole.get(b, b)) for a, b in pairs)
    number: dict[str, int] = {}
    for i, part in enumerate(nx.strongly_connected_components(contracted)):
        number.update(dict.fromkeys(part, i))
    together: dict[int, list[str]] = {}
    for name in nodes:
        together.setdefault(number[whole.get(name, name)], []).append(name)
    for group, members in enumerate(item for item in together.values() if len(item) > 1):
        for member in members:
            nodes[member].group = group


def _leaves_and_returns(
    graph: nx.DiGraph[str], members: Sequence[str], place: Mapping[str, int]
) -> bool:
    """Whether a path between two members runs through other nodes."""
    inside = set(members)
    last = max(place[item] for item in members)
    waiting = [target for item in members for target in graph.successors(item)]
    seen: set[str] = set()
    while waiting:
        node = waiting.pop()
        if node in inside or node in seen or place[node] > last:
            continue
        seen.add(node)
        for target in graph.successors(node):
            if target in inside:
                return True
            waiting.append(target)
    return False
