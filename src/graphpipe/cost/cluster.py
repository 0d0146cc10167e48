"""``Cluster``: devices, the nodes they sit in, and the network between them."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, model_validator

from graphpipe.records import FileRecord, Record

if TYPE_CHECKING:
    from typing import Self


Bandwidth = Annotated[float, Field(gt=1e-9, le=1e30)]
"""Bytes per second, within what integer nanoseconds can tell."""
Latency = Annotated[float, Field(ge=0, le=1e6)]
"""Seconds."""
Memory = Annotated[int, Field(gt=0, le=2**63)]
"""Bytes."""


class Device(Record):
    """One device of the cluster; its rank is its position in ``Cluster.devices``."""

    kind: str
    """Name in the device catalogue, such as ``v100-16gb``; key of ``CostTable.devices``."""
    memory_bytes: Memory
    node: int = Field(default=0, ge=0)


class Network(Record):
    """Bandwidths in bytes per second (of one device, one direction) and latencies in seconds.

    ``None`` for a bandwidth means that transfers take no time (published cost graphs that
    say nothing of a network).
    """

    intra_node_bandwidth: Bandwidth | None = None
    intra_node_latency: Latency = 0.0
    inter_node_bandwidth: Bandwidth | None = None
    inter_node_latency: Latency = 0.0
    devices_per_nic: int = Field(default=1, ge=1)
    """Devices of a node that share one network card of ``inter_node_bandwidth``."""


class NodeLink(Record):
    """Links within one node that differ from the network's ``intra_node_*``.

    Bandwidth in bytes per second of one device in one direction, latency in seconds.
    """

    bandwidth: Bandwidth
    latency: Latency = 0.0


class Cluster(FileRecord):
    """The devices a plan is made for: JSON, or TOML as :mod:`graphpipe.cost.cluster_file` says."""

    file_kind: ClassVar[str] = "graphpipe-cluster"
    written_by: ClassVar[str] = "graphpipe cluster show NAME -o FILE"
    file_version: ClassVar[int] = 1

    kind: str = file_kind
    version: int = file_version
    name: str = "cluster"
    devices: tuple[Device, ...] = Field(min_length=1)
    network: Network = Network()
    node_links: tuple[NodeLink | None, ...] = ()
    """By node, where links within it differ from the network's; empty: nowhere."""

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The distinct kinds of device, sorted."""
        return tuple(sorted({device.kind for device in self.devices}))

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by node, nodes ascending."""
        groups: dict[int, list[int]] = {}
        for rank, device in enumerate(self.devices):
            groups.setdefault(device.node, []).append(rank)
        return tuple(tuple(groups[node]) for node in sorted(groups))

    @cached_property
    def nics(self) -> tuple[tuple[int, int], ...]:
        """For each rank its network card: (node, number within the node)."""
        cards: list[tuple[int, int]] = [(0, 0)] * self.world_size
        for node, ranks in enumerate(self.nodes):
            for i, rank in enumerate(ranks):
                cards[rank] = (node, i // self.network.devices_per_nic)
        return tuple(cards)

    def node_link(self, node: int) -> tuple[float, float | None]:
        """Latency (seconds) and bandwidth (bytes per second, None: no cost) within a node."""
        own = self.node_links[node] if self.node_links else None
        if own is not None:
            return own.latency, own.bandwidth
        return self.network.intra_node_latency, self.network.intra_node_bandwidth

    def link(self, source: int, target: int) -> tuple[float, float | None]:
        """Latency (seconds) and bandwidth (bytes per second, None: no cost) between ranks."""
        node = self.devices[source].node
        if node == self.devices[target].node:
            return self.node_link(node)
        return self.network.inter_node_latency, self.network.inter_node_bandwidth

    def transfer_ns(self, source: int, target: int, nbytes: float) -> int:
        """Nanoseconds that the wire is busy with a message, without the latency."""
        _, bandwidth = self.link(source, target)
        return 0 if bandwidth is None else round(nbytes / bandwidth * 1e9)

    def latency_ns(self, source: int, target: int) -> int:
        return round(self.link(source, target)[0] * 1e9)

    def all_reduce_seconds(self, ranks: tuple[int, ...], nbytes: float) -> float:
        """An all-reduce of ``nbytes`` over ``ranks``, the faster of two algorithms.

        *Ring*: every rank sends 2 (n-1)/n of the bytes over the slowest link that the ring
        uses; between nodes that is one network card. *Hierarchical*, where several ranks
        share each node: reduce-scatter within the node, all-reduce of each rank's part
        between the nodes, all-gather within the node; ranks on one network card share it.
        """
        count = len(ranks)
        if count < 2:
            return 0.0
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self.devices[rank].node, []).append(rank)
        inside = [self.node_link(node) for node, members in by_node.items() if len(members) > 1]
        if len(by_node) == 1:
            return _ring(count, nbytes, inside)
        net = self.network
        between = (net.inter_node_latency, net.inter_node_bandwidth)
        ring = _ring(count, nbytes, [between, *inside])
        smallest = min(len(members) for members in by_node.values())
        if smallest < 2:
            return ring
        cards: dict[tuple[int, int], int] = {}
        for rank in ranks:
            cards[self.nics[rank]] = cards.get(self.nics[rank], 0) + 1
        shared = max(cards.values())
        crossing = _ring(len(by_node), nbytes / smallest * shared, [between])
        return min(ring, _ring(smallest, nbytes, inside) + crossing)

    @classmethod
    def uniform(
        cls,
        device: str,
        *,
        nodes: int = 1,
        per_node: int = 1,
        memory_bytes: int | None = None,
        network: Network | None = None,
    ) -> Self:
        """A cluster of equal nodes. Memory and network default to the catalogue's."""
        from graphpipe.cost.catalogue import device as find_device

        spec = find_device(device)
        memory = memory_bytes if memory_bytes is not None else spec.memory_bytes
        net = network if network is not None else spec.default_network
        devices = tuple(
            Device(kind=spec.name, memory_bytes=memory, node=node)
            for node in range(nodes)
            for _ in range(per_node)
        )
        return cls(name=f"{nodes}x{per_node} {spec.name}", devices=devices, network=net)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cluster as TOML if ``path`` ends in ``.toml``, else as JSON.

        Raises:
            FileFormatError: if the file cannot be written.
            ClusterError: if the cluster does not fit the TOML form.
        """
        if Path(path).suffix == ".toml":
            from graphpipe.cost.cluster_file import to_toml

            self._write(Path(path), to_toml(self))
        else:
            super().save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads TOML if ``path`` ends in ``.toml``, else JSON.

        Raises:
            FileFormatError: if it cannot be read, naming the field that is wrong.
        """
        if Path(path).suffix == ".toml":
            from graphpipe.cost.cluster_file import load_toml

            return load_toml(cls, path)
        return super().load(path)

    @model_validator(mode="after")
    def _links_of_every_node(self) -> Self:
        if self.node_links and len(self.node_links) != len(self.nodes):
            raise ValueError(
                f"node_links has {len(self.node_links)} entries for {len(self.nodes)} nodes"
            )
        return self

    @model_validator(mode="after")
    def _nodes_are_numbered(self) -> Self:
        present = {device.node for device in self.devices}
        if present != set(range(len(present))):
            raise ValueError(f"nodes must be numbered 0, 1, 2, ...; found {sorted(present)}")
        return self


def _ring(count: int, nbytes: float, links: list[tuple[float, float | None]]) -> float:
    """A ring all-reduce over ``count`` ranks on the slowest of some (latency, bandwidth) links."""
    speeds = [bandwidth for _, bandwidth in links if bandwidth is not None]
    volume = 2.0 * (count - 1) / count * nbytes
    latency = max(latency for latency, _ in links)
    return (volume / min(speeds) if speeds else 0.0) + 2 * (count - 1) * latency
