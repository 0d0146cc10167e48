"""A cluster as a TOML file that a person can write.

.. code-block:: toml

    name = "lab"

    [network]                        # optional: default is that of the devices' catalogue entry
    intra_node_bandwidth = 300e9     # bytes per second of one device in one direction
    intra_node_latency = 1e-5        # seconds
    inter_node_bandwidth = 25e9      # of one network card
    inter_node_latency = 2e-5
    devices_per_nic = 2

    [[nodes]]
    count = 4                        # default 1
    device = "a100-80gb"             # of the catalogue, or any name if memory_bytes is given
    devices = 8
    memory_bytes = 80e9              # default: the catalogue's

    [[nodes]]
    box = "dgx-h100"                 # a preset instead of device and devices
    intra_node_bandwidth = 450e9     # of these nodes, instead of [network]'s
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w
from pydantic import Field, ValidationError

from graphpipe.cost.boxes import MOST_DEVICES, boxes
from graphpipe.cost.catalogue import device
from graphpipe.cost.cluster import Bandwidth, Device, Latency, Network, NodeLink
from graphpipe.errors import ClusterError, FileFormatError, GraphPipeError
from graphpipe.records import Record

if TYPE_CHECKING:
    from typing import TypeVar

    from graphpipe.cost.cluster import Cluster

    Kind = TypeVar("Kind", bound=Cluster)


class _Nodes(Record):
    """One ``[[nodes]]`` table."""

    count: int = Field(default=1, ge=1, le=MOST_DEVICES)
    box: str | None = None
    device: str | None = None
    devices: int | None = Field(default=None, ge=1, le=MOST_DEVICES)
    memory_bytes: float | None = Field(default=None, ge=1, le=2**63)
    intra_node_bandwidth: Bandwidth | None = None
    intra_node_latency: Latency | None = None


class _File(Record):
    """The whole file."""

    name: str = "cluster"
    network: Network | None = None
    nodes: list[_Nodes] = Field(min_length=1)


def read_toml(kind: type[Kind], text: str, *, where: str) -> Kind:
    """The cluster of a TOML text.

    Raises:
        FileFormatError: naming the field that is wrong.
    """
    try:
        file = _File.model_validate(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise FileFormatError(
            "The cluster file is not valid TOML", where=where, got=error
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise FileFormatError(
            f"Malformed cluster: {first['msg']}",
            where=f"{where}, field '{'.'.join(str(part) for part in first['loc'])}'",
            got=repr(first.get("input"))[:60],
        ) from None
    devices: list[Device] = []
    links: list[NodeLink | None] = []
    networks: list[Network | None] = []
    for i, item in enumerate(file.nodes):
        place = f"{where}, field 'nodes.{i}'"
        name, per_node, network = _what(item, place)
        if len(devices) + item.count * per_node > MOST_DEVICES:
            raise FileFormatError(
                "Too many devices", where=place, expected=f"at most {MOST_DEVICES}"
            )
        spec_memory, network = _catalogue(name, item, network, place)
        networks.append(network)
        for _ in range(item.count):
            one = Device(kind=name, memory_bytes=spec_memory, node=len(links))
            devices += [one] * per_node
            links.append(_link(item, network, file.network, place))
    network = file.network or _common(networks, where)
    plain = (network.intra_node_latency, network.intra_node_bandwidth)
    own = tuple(
        link if link is not None and (link.latency, link.bandwidth) != plain else None
        for link in links
    )
    return kind(
        name=file.name,
        devices=tuple(devices),
        network=network,
        node_links=own if any(own) else (),
    )


def _what(item: _Nodes, place: str) -> tuple[str, int, Network | None]:
    """Kind of device, devices per node, and the network of a preset."""
    if item.box is not None:
        if item.device is not None or item.devices is not None:
            raise FileFormatError("A node is a box, or has a device and devices", where=place)
        box = boxes().get(item.box)
        if box is None:
            raise FileFormatError(
                "Unknown box",
                where=place,
                expected="one of " + ", ".join(sorted(boxes())),
                got=repr(item.box),
            )
        return box.device, box.devices, box.network
    if item.device is None or item.devices is None:
        missing = "device" if item.device is None else "devices"
        raise FileFormatError("A node lacks a field", where=place, expected=f"'{missing}'")
    return item.device, item.devices, None


def _catalogue(
    name: str, item: _Nodes, network: Network | None, place: str
) -> tuple[int, Network | None]:
    """Memory and default network of a kind; one that the catalogue lacks states its memory."""
    try:
        spec = device(name)
    except GraphPipeError as error:
        if item.memory_bytes is None:
            raise FileFormatError(
                f"{error.what}, and its 'memory_bytes' are not given", where=place, got=repr(name)
            ) from None
        return int(item.memory_bytes), network
    memory = int(item.memory_bytes) if item.memory_bytes is not None else spec.memory_bytes
    return memory, network or spec.default_network


def _link(item: _Nodes, own: Network | None, common: Network | None, place: str) -> NodeLink | None:
    """The link within a node: as stated, else the file's network, else its own default."""
    base = common or own
    bandwidth, latency = item.intra_node_bandwidth, item.intra_node_latency
    if base is not None:
        bandwidth = base.intra_node_bandwidth if bandwidth is None else bandwidth
        latency = base.intra_node_latency if latency is None else latency
    if bandwidth is not None:
        return NodeLink(bandwidth=bandwidth, latency=latency or 0.0)
    if item.intra_node_latency is not None:
        raise FileFormatError(
            "A node states a latency, but no bandwidth is known for it",
            where=place,
            expected="'intra_node_bandwidth'",
        )
    return None


def _common(networks: list[Network | None], where: str) -> Network:
    """Between unlike nodes: the slower card, the longer latency, the most devices on a card."""
    known = [network for network in networks if network is not None]
    if len(known) < len(networks):
        raise FileFormatError(
            "The network is not given, and the catalogue does not know these devices",
            where=f"{where}, field 'network'",
        )
    between = [item.inter_node_bandwidth for item in known if item.inter_node_bandwidth]
    return Network(
        intra_node_bandwidth=known[0].intra_node_bandwidth,
        intra_node_latency=known[0].intra_node_latency,
        inter_node_bandwidth=min(between) if between else None,
        inter_node_latency=max(item.inter_node_latency for item in known),
        devices_per_nic=max(item.devices_per_nic for item in known),
    )


def to_toml(cluster: Cluster, *, comment: str = "") -> str:
    """The cluster as TOML; :func:`read_toml` of it gives an equal cluster.

    Raises:
        ClusterError: if ranks of one node do not follow one another, or differ: such a
            cluster can only be saved as JSON.
    """
    tables: list[dict[str, object]] = []
    network = cluster.network.model_dump(exclude_none=True)
    start = 0
    for node, ranks in enumerate(cluster.nodes):
        first = cluster.devices[ranks[0]]
        if ranks != tuple(range(start, start + len(ranks))) or any(
            cluster.devices[rank] != first for rank in ranks
        ):
            raise ClusterError(
                "This cluster does not fit the TOML form, whose nodes have equal devices in order",
                where=f"node {node}",
                fix="Save it as .json",
            )
        start += len(ranks)
        table: dict[str, object] = {
            "count": 1,
            "device": first.kind,
            "devices": len(ranks),
            "memory_bytes": first.memory_bytes,
        }
        link = cluster.node_links[node] if cluster.node_links else None
        if link is not None:
            table["intra_node_bandwidth"] = link.bandwidth
            table["intra_node_latency"] = link.latency
        same = {**table, "count": tables[-1]["count"]} if tables else {}
        if tables and tables[-1] == same:
            tables[-1]["count"] = int(str(tables[-1]["count"])) + 1
        else:
            tables.append(table)
    text = tomli_w.dumps({"name": cluster.name, "network": network, "nodes": tables})
    return "".join(f"# {line}\n" for line in comment.splitlines()) + text


def load_toml(kind: type[Kind], path: str | os.PathLike[str]) -> Kind:
    """Reads a TOML file.

    Raises:
        FileFormatError: if it cannot be read, naming the field that is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise FileFormatError(
            f"Cannot read the cluster file: {error.strerror}", where=str(path)
        ) from None
    except UnicodeDecodeError as error:
        raise FileFormatError("The cluster file is not UTF-8", where=str(path), got=error) from None
    return read_toml(kind, text, where=str(path))
