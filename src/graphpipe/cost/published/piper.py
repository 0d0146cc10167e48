"""Piper's input JSON (Tarnawski, Narayanan, Phanishayee, NeurIPS 2021).

A node has, per degree of tensor parallelism, up to two configurations, ``vanilla`` and
``activation recomp``. The graph and cost table hold the vanilla configuration of degree 1;
:class:`PiperFile` keeps everything, for a planner that chooses among them.

One *sample* of the cost table is one micro-batch of the file, since all its figures are
per micro-batch. Forward and backward come as one time; it is split 1 : 2, the ratio of the
FLOPs of a layer's forward and backward. ``memoryUsageB`` is twice the parameters (weights
and gradients); what exceeds that is kept as a constant of the node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from graphpipe.cost.published.build import (
    MOST_DEVICES,
    MOST_SAMPLES,
    GraphDefaults,
    GraphFile,
    Node,
    build,
    memory_limit,
)
from graphpipe.cost.published.fields import Fields
from graphpipe.cost.table import ParameterMemory
from graphpipe.errors import FileFormatError

VANILLA = "vanilla"
RECOMPUTE = "activation recomp"
TimeUnit = Literal["s", "ms"]


@dataclass(frozen=True)
class PiperConfiguration:
    """One way to run a node on ``degree`` devices.

    Attributes:
        seconds: Forward and backward of one micro-batch, seconds.
        parameter_bytes: For the data-parallel all-reduce.
        memory_a: Bytes per micro-batch in flight.
        memory_b: Bytes held whatever is in flight.
        sync_forward: Bytes of extra traffic if the edge from this predecessor is cut, by id.
        sync_backward: The same for the edge to this successor, by id.
    """

    seconds: float
    parameter_bytes: float
    memory_a: float
    memory_b: float
    sync_forward: dict[str, float]
    sync_backward: dict[str, float]


@dataclass(frozen=True)
class PiperNode:
    """A node: configurations by (tensor-parallel degree, ``vanilla`` or ``activation recomp``)."""

    id: str
    name: str
    configurations: dict[tuple[int, str], PiperConfiguration]


@dataclass(frozen=True)
class PiperFile:
    """Everything that a Piper JSON says.

    Attributes:
        devices: Number of devices, all alike.
        memory_bytes: Of each.
        bandwidth: Bytes per second of one device to the outside.
        micro_batches: Micro-batches in a mini-batch.
        nodes: In the file's order.
        edges: (source id, target id) to bytes per micro-batch.
        notes: Remarks, such as the unit of time that was assumed.
    """

    devices: int | None
    memory_bytes: int | None
    bandwidth: float | None
    micro_batches: int | None
    nodes: tuple[PiperNode, ...]
    edges: dict[tuple[str, str], float]
    notes: tuple[str, ...] = ()


def parse_piper(data: Fields, *, time_unit: TimeUnit | None = None) -> PiperFile:
    """Reads everything that the file says.

    Args:
        data: The file's object.
        time_unit: Unit of ``timePerSample``, which the format leaves open. None: seconds, as
            Piper's program reads it, unless some node would then take more than a second
            for one micro-batch, which means milliseconds; a note says so.

    Raises:
        FileFormatError: naming id and field.
    """
    raw = [_node(item) for item in data.objects("nodes", "node")]
    notes: tuple[str, ...] = ()
    if time_unit is None:
        slowest = max((c.seconds for node in raw for c in node.configurations.values()), default=0)
        time_unit = "ms" if slowest > 1.0 else "s"
        if time_unit == "ms":
            notes = (
                f"the slowest node takes {slowest:g} units of time: read as milliseconds "
                "(the file does not say; give the unit if that is wrong)",
            )
    scale = 1e-3 if time_unit == "ms" else 1.0
    nodes = tuple(
        PiperNode(
            node.id,
            node.name,
            {
                key: PiperConfiguration(
                    c.seconds * scale,
                    c.parameter_bytes,
                    c.memory_a,
                    c.memory_b,
                    c.sync_forward,
                    c.sync_backward,
                )
                for key, c in node.configurations.items()
            },
        )
        for node in raw
    )
    edges: dict[tuple[str, str], float] = {}
    for item in data.objects("edges", "edge"):
        ends = (item.identity("sourceId"), item.identity("destId"))
        edges[ends] = max(edges.get(ends, 0.0), item.number("communicationCost"))
    batches = "mbsInBatch" if "mbsInBatch" in data.values else "maxBatchSize"
    return PiperFile(
        devices=data.count("maxDevices", largest=MOST_DEVICES),
        memory_bytes=memory_limit(data.positive("maxMemoryPerDevice")),
        bandwidth=data.positive("bandwidth"),
        micro_batches=data.count(batches, largest=MOST_SAMPLES),
        nodes=nodes,
        edges=edges,
        notes=notes,
    )


def read_piper(
    data: Fields,
    *,
    name: str,
    time_unit: TimeUnit | None = None,
    parameter_memory: ParameterMemory | None = None,
) -> GraphFile:
    """Reads a Piper JSON as graph and costs (degree 1, ``vanilla``).

    Where the edges of one source carry different bytes, its output has the largest.

    Raises:
        FileFormatError: naming id and field.
    """
    file = parse_piper(data, time_unit=time_unit)
    output: dict[str, float] = {}
    for (source, _), nbytes in file.edges.items():
        output[source] = max(output.get(source, 0.0), nbytes)
    nodes: list[Node] = []
    for item in file.nodes:
        config = item.configurations.get((1, VANILLA))
        if config is None:
            raise FileFormatError(
                f"A node has no '{VANILLA}' configuration for one device",
                where=f"{data.where}, node '{item.id}', field 'TMPCs'",
            )
        nodes.append(
            Node(
                id=item.id,
                name=item.name,
                forward=config.seconds / 3,
                backward=config.seconds * 2 / 3,
                parameter_bytes=config.parameter_bytes,
                constant_bytes=max(0.0, config.memory_b - 2 * config.parameter_bytes),
                saved_bytes=config.memory_a,
                output_bytes=output.get(item.id, 0.0),
            )
        )
    return build(
        name,
        nodes,
        list(file.edges),
        where=data.where,
        parameter_memory=parameter_memory or ParameterMemory(1.0, 1.0, 0.0),
        defaults=GraphDefaults(
            devices=file.devices,
            memory_bytes=file.memory_bytes,
            bandwidth=file.bandwidth,
            mini_batch=file.micro_batches,
            micro_batch=1,
        ),
        notes=file.notes,
    )


def _node(item: Fields) -> PiperNode:
    identity = item.identity("id")
    place = f"{item.where.rsplit(', nodes[', 1)[0]}, node '{identity}'"
    node = Fields(item.values, place)
    table = node.table("TMPCs")
    configurations: dict[tuple[int, str], PiperConfiguration] = {}
    for degree in table.values:
        if not (degree.isascii() and degree.isdigit() and 1 <= int(degree[:6]) <= MOST_DEVICES):
            table.fail(degree, "Not a tensor-parallel degree", expected="a number such as '1'")
        for config in table.objects(degree, "configuration"):
            kind = config.text("id")
            key = (int(degree), kind)
            if kind not in (VANILLA, RECOMPUTE) or key in configurations:
                config.fail(
                    "id",
                    "An unknown or repeated configuration",
                    expected=f"'{VANILLA}' or '{RECOMPUTE}', once each",
                )
            configurations[key] = PiperConfiguration(
                seconds=config.number("timePerSample"),
                parameter_bytes=config.number("parameterSize"),
                memory_a=config.number("memoryUsageA"),
                memory_b=config.number("memoryUsageB"),
                sync_forward=_bytes_by_id(config, "syncTimeFw"),
                sync_backward=_bytes_by_id(config, "syncTimeBw"),
            )
    return PiperNode(identity, node.text("name"), configurations)


def _bytes_by_id(config: Fields, field: str) -> dict[str, float]:
    table = config.table(field)
    return {other: table.number(other) for other in table.values}
