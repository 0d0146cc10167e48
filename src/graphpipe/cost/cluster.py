"""``Cluster``: devices, the nodes they sit in, and the network between them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, model_validator

from graphpipe.records import FileRecord, Record

if TYPE_CHECKING:
    from typing import Self


class Device(Record):
    """One device of the cluster; its rank is its position in ``Cluster.devices``."""

    kind: str
    """Name in the device catalogue, such as ``v100-16gb``; key of ``CostTable.devices``."""
    memory_bytes: int = Field(gt=0)
    node: int = Field(default=0, ge=0)


class Network(Record):
    """Bandwidths in bytes per second (of one device, one direction) and latencies in seconds.

    ``None`` for a bandwidth means that transfers take no time (published cost graphs that
    say nothing of a network).
    """

    intra_node_bandwidth: float | None = Field(default=None, gt=0)
    intra_node_latency: float = Field(default=0.0, ge=0)
    inter_node_bandwidth: float | None = Field(default=None, gt=0)
    inter_node_latency: float = Field(default=0.0, ge=0)
    devices_per_nic: int = Field(default=1, ge=1)
    """Devices of a node that share one network card of ``inter_node_bandwidth``."""


class Cluster(FileRecord):
    """The devices a plan is made for. Also readable from TOML, see :meth:`load`."""

    file_kind: ClassVar[str] = "graphpipe-cluster"
    file_version: ClassVar[int] = 1

    kind: str = file_kind
    version: int = file_version
    name: str = "cluster"
    devices: tuple[Device, ...] = Field(min_length=1)
    network: Network = Network()

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

    def link(self, source: int, target: int) -> tuple[float, float | None]:
        """Latency (seconds) and bandwidth (bytes per second, None: no cost) between ranks."""
        net = self.network
        if self.devices[source].node == self.devices[target].node:
            return net.intra_node_latency, net.intra_node_bandwidth
        return net.inter_node_latency, net.inter_node_bandwidth

    def transfer_ns(self, source: int, target: int, nbytes: float) -> int:
        """Nanoseconds that the wire is busy with a message, without the latency."""
        _, bandwidth = self.link(source, target)
        return 0 if bandwidth is None else round(nbytes / bandwidth * 1e9)

    def latency_ns(self, source: int, target: int) -> int:
        return round(self.link(source, target)[0] * 1e9)

    def all_reduce_seconds(self, ranks: tuple[int, ...], nbytes: float) -> float:
        """A ring all-reduce of ``nbytes`` over ``ranks``: 2 (n-1)/n bytes over the slowest link.

        Ranks of several nodes share their network cards (``devices_per_nic``).
        """
        count = len(ranks)
        if count < 2:
            return 0.0
        nodes = {self.devices[rank].node for rank in ranks}
        net = self.network
        if len(nodes) == 1:
            bandwidth, latency = net.intra_node_bandwidth, net.intra_node_latency
        else:
            bandwidth, latency = net.inter_node_bandwidth, net.inter_node_latency
        volume = 2.0 * (count - 1) / count * nbytes
        return (0.0 if bandwidth is None else volume / bandwidth) + 2 * (count - 1) * latency

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

    @model_validator(mode="after")
    def _nodes_are_numbered(self) -> Self:
        present = {device.node for device in self.devices}
        if present != set(range(len(present))):
            raise ValueError(f"nodes must be numbered 0, 1, 2, ...; found {sorted(present)}")
        return self
