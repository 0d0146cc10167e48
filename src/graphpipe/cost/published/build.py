"""From the nodes and edges of a foreign profile to a ``ModelGraph`` with a ``CostTable``."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from graphpipe.cost.cluster import Cluster, Device, Network
from graphpipe.cost.table import CostTable, DeviceCosts, Exclusion, ParameterMemory
from graphpipe.errors import CostError, FileFormatError
from graphpipe.graph.model_graph import ModelGraph, Op, Parameter, Storage, TensorSpec

KIND = "published"
"""Kind of device, op target and source of everything read from a published profile."""
MOST_DEVICES = 100_000
MOST_SAMPLES = 2**31
UNLIMITED = 2**62
"""Memory of a device where the file states no limit, bytes."""


@dataclass
class Node:
    """One node of a profile, in seconds and bytes.

    Attributes:
        id: Its id as text; becomes the name of the op.
        name: What the file calls it.
        forward: Seconds per sample.
        backward: Seconds per sample; 0 for none.
        parameter_bytes: Of weights.
        trainable: Whether the weights have gradients and optimizer state.
        constant_bytes: Other bytes that stay on the device.
        saved_bytes: Kept from forward to backward, per sample.
        output_bytes: Sent to a consumer in another stage, per sample.
        group: Nodes with the same number must stay in one stage.
        excluded: Micro-batch sizes at which it cannot run, with the reason.
    """

    id: str
    name: str = ""
    forward: float = 0.0
    backward: float = 0.0
    parameter_bytes: float = 0.0
    trainable: bool = True
    constant_bytes: float = 0.0
    saved_bytes: float = 0.0
    output_bytes: float = 0.0
    group: int | None = None
    excluded: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class GraphDefaults:
    """What a file says about the devices and the batch; None where it is silent.

    Attributes:
        devices: Number of devices.
        memory_bytes: Of each device.
        bandwidth: Bytes per second between any two devices; None: transfers take no time.
        mini_batch: Samples of one optimizer step.
        micro_batch: Samples of one task.
    """

    devices: int | None = None
    memory_bytes: int | None = None
    bandwidth: float | None = None
    mini_batch: int | None = None
    micro_batch: int | None = None

    def cluster(
        self,
        *,
        devices: int | None = None,
        memory_bytes: int | None = None,
        bandwidth: float | None = None,
    ) -> Cluster:
        """The cluster that the file describes; arguments replace what it says.

        Raises:
            CostError: if neither says how many devices there are.
        """
        count = devices if devices is not None else self.devices
        if count is None:
            raise CostError(
                "The graph file does not say how many devices there are",
                fix="Give their number (--devices)",
            )
        if not 1 <= count <= MOST_DEVICES:
            raise CostError("Not a number of devices", expected=f"1 to {MOST_DEVICES}", got=count)
        memory = memory_bytes if memory_bytes is not None else self.memory_bytes
        speed = bandwidth if bandwidth is not None else self.bandwidth
        one = Device(kind=KIND, memory_bytes=UNLIMITED if memory is None else memory)
        network = Network(intra_node_bandwidth=speed, inter_node_bandwidth=speed)
        return Cluster(name=f"{count} devices", devices=(one,) * count, network=network)


class GraphFile(NamedTuple):
    """A published profile, ready to be planned.

    Attributes:
        graph: Ops with target ``published``; no program.
        costs: Times per sample, in one column for ``micro_batches == (1,)``.
        defaults: Devices and batch, as far as the file states them.
    """

    graph: ModelGraph
    costs: CostTable
    defaults: GraphDefaults


def memory_limit(value: float | None) -> int | None:
    """A memory limit in whole bytes, at least one."""
    return None if value is None else max(1, math.floor(value))


def build(
    name: str,
    nodes: Sequence[Node],
    edges: Sequence[tuple[str, str]],
    *,
    where: str,
    parameter_memory: ParameterMemory,
    defaults: GraphDefaults,
    notes: Sequence[str] = (),
) -> GraphFile:
    """Checks the structure and builds graph and costs.

    A node needs a gradient if it, or anything it depends on, has a backward. The gradient
    of an output has the size of the output. Repeated edges count once.

    Raises:
        FileFormatError: for an empty graph, a repeated id, an unknown endpoint, a self-loop
            or a cycle, naming the ids.
    """
    if not nodes:
        raise FileFormatError("The graph is empty: it has no nodes", where=where)
    index: dict[str, int] = {}
    for i, node in enumerate(nodes):
        if node.id in index:
            raise FileFormatError("An id is there twice", where=f"{where}, node '{node.id}'")
        index[node.id] = i
    sources: list[set[int]] = [set() for _ in nodes]
    for source, target in edges:
        for end in (source, target):
            if end not in index:
                raise FileFormatError(
                    f"An edge names the unknown node '{end}'",
                    where=f"{where}, edge '{source}' -> '{target}'",
                )
        if source == target:
            raise FileFormatError(
                f"An edge leads from node '{source}' to itself", where=f"{where}, edges"
            )
        sources[index[target]].add(index[source])
    order = _topological(nodes, sources, where)
    has_gradient = _needs_gradient(nodes, sources, order)
    ops: list[Op] = []
    parameters: list[Parameter] = []
    for i in order:
        node = nodes[i]
        held = _parameters_of(node)
        parameters += held
        inputs = tuple(nodes[j].id for j in sorted(sources[i]))
        ops.append(_op(node, inputs, tuple(item.name for item in held), has_gradient[i]))
    graph = ModelGraph(
        name=name, training=any(has_gradient), ops=tuple(ops), parameters=tuple(parameters)
    )
    costs = _costs(graph, [nodes[i] for i in order], parameter_memory, notes)
    return GraphFile(graph, costs, defaults)


def _topological(nodes: Sequence[Node], sources: Sequence[set[int]], where: str) -> list[int]:
    """A topological order that keeps the file's order where it can."""
    waiting = [len(items) for items in sources]
    targets: list[list[int]] = [[] for _ in nodes]
    for i, items in enumerate(sources):
        for j in items:
            targets[j].append(i)
    ready = [i for i, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for j in targets[i]:
            waiting[j] -= 1
            if waiting[j] == 0:
                heapq.heappush(ready, j)
    if len(order) < len(nodes):
        ids = " -> ".join(f"'{nodes[i].id}'" for i in _cycle(waiting, sources))
        raise FileFormatError(f"The graph has a cycle: {ids}", where=f"{where}, edges")
    return order


def _cycle(waiting: Sequence[int], sources: Sequence[set[int]]) -> list[int]:
    """Some cycle among the nodes that were left over, in the direction of the edges."""
    here = next(i for i, count in enumerate(waiting) if count)
    path: list[int] = []
    seen: dict[int, int] = {}
    while here not in seen:
        seen[here] = len(path)
        path.append(here)
        here = min(j for j in sources[here] if waiting[j])
    found = path[seen[here] :][::-1]
    return [*found, found[0]] if len(found) <= 8 else [*found[:8], found[0]]


def _needs_gradient(
    nodes: Sequence[Node], sources: Sequence[set[int]], order: Sequence[int]
) -> list[bool]:
    needs = [node.backward > 0 for node in nodes]
    for i in order:
        needs[i] = needs[i] or any(needs[j] for j in sources[i])
    return needs


def _parameters_of(node: Node) -> list[Parameter]:
    held: list[Parameter] = []
    if node.parameter_bytes > 0:
        size = math.ceil(node.parameter_bytes)
        held.append(Parameter(name=node.id, shape=(size,), dtype="uint8", trainable=node.trainable))
    if node.constant_bytes > 0:
        size = math.ceil(node.constant_bytes)
        held.append(
            Parameter(
                name=f"{node.id}.constant",
                shape=(size,),
                dtype="uint8",
                trainable=False,
                is_buffer=True,
            )
        )
    return held


def _op(node: Node, inputs: tuple[str, ...], parameters: tuple[str, ...], gradient: bool) -> Op:
    kept = math.ceil(node.saved_bytes)
    return Op(
        name=node.id,
        target=KIND,
        key=node.id,
        module=node.name or node.id,
        inputs=inputs,
        parameters=parameters,
        output=TensorSpec(
            shape=("b", math.ceil(node.output_bytes)), dtype="uint8", requires_grad=gradient
        ),
        requires_grad=gradient,
        group=node.group,
        saves=(Storage(id=node.id, bytes=f"{kept}*b"),) if kept else (),
    )


def _costs(
    graph: ModelGraph, nodes: Sequence[Node], memory: ParameterMemory, notes: Sequence[str]
) -> CostTable:
    count = len(nodes)
    output = np.zeros((count, 2))
    output[:, 1] = [node.output_bytes for node in nodes]
    gradient = output * np.asarray([[op.requires_grad] for op in graph.ops], dtype=np.float64)
    storages: list[tuple[float, float]] = []
    saved: list[tuple[int, ...]] = []
    for node in nodes:
        saved.append((len(storages),) if node.saved_bytes > 0 else ())
        if node.saved_bytes > 0:
            storages.append((0.0, node.saved_bytes))
    forward = np.asarray([[node.forward] for node in nodes], dtype=np.float64)
    backward = np.asarray([[node.backward] for node in nodes], dtype=np.float64)
    return CostTable(
        fingerprint=graph.fingerprint,
        source="published",
        ops=tuple(node.id for node in nodes),
        micro_batches=(1,),
        devices={KIND: DeviceCosts(forward, backward)},
        output_bytes=output,
        gradient_bytes=gradient,
        storages=np.asarray(storages, dtype=np.float64).reshape(-1, 2),
        saved=tuple(saved),
        workspace_bytes=np.zeros((count, 2)),
        parameter_memory=memory,
        notes=tuple(notes),
        exclusions=tuple(
            Exclusion(node.id, size, reason) for node in nodes for size, reason in node.excluded
        ),
    )
