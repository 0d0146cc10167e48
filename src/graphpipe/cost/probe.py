"""Measuring the links of a cluster from inside a running process group.

Every rank calls :func:`probe`. Pairs of ranks exchange messages one pair at a time while the
others wait: small ones for the latency, two large sizes for the bandwidth (the slope
between them, so that the latency does not enter). Then several pairs between the same
two nodes send at once, which shows how many devices share a network card.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from graphpipe.cost.cluster import Cluster, Device, Network
from graphpipe.cost.cluster_file import to_toml
from graphpipe.cost.hardware import hardware
from graphpipe.errors import ClusterError

LATENCY_ROUNDS = 30
LARGE_BYTES = (2**20, 2**24)
"""Sizes between which the bandwidth is the slope."""
LARGE_ROUNDS = 5
MOST_PAIRS = 12
"""Pairs measured of each class (within nodes, between nodes)."""
_REPORT_BYTES = 1024


class LinkMeasurement(NamedTuple):
    """One pair of ranks: latency in seconds, bandwidth in bytes per second, one direction."""

    source: int
    target: int
    within_node: bool
    latency: float
    bandwidth: float


class Probe(NamedTuple):
    """Result of :func:`probe`, the same on every rank.

    Attributes:
        cluster: What was found, ready to plan for. Of each class of links the median.
        links: The single measurements.
        hosts: Name of the host of each rank.
    """

    cluster: Cluster
    links: tuple[LinkMeasurement, ...]
    hosts: tuple[str, ...]

    def toml(self) -> str:
        """The cluster as TOML, with the single measurements as comments."""
        lines = [f"Measured by graphpipe cluster probe between {len(self.hosts)} ranks."]
        lines += [f"rank {rank}: {host}" for rank, host in enumerate(self.hosts)]
        lines += [
            f"{link.source} -> {link.target}: {link.latency * 1e6:.1f} us, "
            f"{link.bandwidth / 1e9:.3f} GB/s"
            for link in self.links
        ]
        return to_toml(self.cluster, comment="\n".join(lines))


def probe(
    device: torch.device | str = "cpu", *, name: str = "probed", host: str | None = None
) -> Probe:
    """Measures the links between the ranks of the default process group. All ranks call it.

    Args:
        device: Where the messages lie: the rank's CUDA device for NCCL, ``cpu`` for gloo.
        name: Name of the cluster.
        host: Name of this rank's node, instead of the machine's host name.

    Raises:
        ClusterError: if there is no process group, or the ranks of a node do not follow one
            another.
    """
    if not dist.is_initialized():
        raise ClusterError(
            "The probe measures between running ranks, and no process group is initialised",
            fix="Start it with torchrun, on every node that you plan to use",
        )
    place = torch.device(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    own = hardware(place)
    mine = {
        "host": (host or socket.gethostname())[:200],
        "kind": own.kind,
        "memory": own.memory_bytes,
        "cpu": place.type == "cpu",
    }
    reports = [json.loads(item) for item in _gather_text(json.dumps(mine), place)]
    hosts = tuple(str(item["host"]) for item in reports)
    node_of = {item: i for i, item in enumerate(dict.fromkeys(hosts))}
    nodes = [node_of[item] for item in hosts]
    if nodes != sorted(nodes):
        raise ClusterError(
            "The ranks of a node must follow one another", expected="as torchrun does", got=hosts
        )
    inside, between = _pairs(nodes)
    links: list[LinkMeasurement] = []
    for pair in (*inside, *between):
        mine_measured = _measure(pair, rank, place)
        latency, bandwidth = _share(mine_measured, pair[0], place)
        within = nodes[pair[0]] == nodes[pair[1]]
        links.append(LinkMeasurement(pair[0], pair[1], within, latency, bandwidth))
    sharing = _devices_per_nic(nodes, links, rank, place)
    devices = tuple(
        Device(
            kind=str(item["kind"]),
            # Workers on the CPUs of one host share its memory.
            memory_bytes=int(item["memory"]) // (nodes.count(node) if item["cpu"] else 1),
            node=node,
        )
        for item, node in zip(reports, nodes, strict=True)
    )
    cluster = Cluster(name=name, devices=devices, network=_network(links, sharing))
    dist.barrier()
    assert cluster.world_size == world
    return Probe(cluster, tuple(links), hosts)


def _network(links: Sequence[LinkMeasurement], sharing: int) -> Network:
    values: dict[str, float] = {}
    for prefix, within in (("intra_node", True), ("inter_node", False)):
        chosen = [link for link in links if link.within_node == within]
        if chosen:
            values[f"{prefix}_bandwidth"] = median(link.bandwidth for link in chosen)
            values[f"{prefix}_latency"] = median(link.latency for link in chosen)
    return Network.model_validate({**values, "devices_per_nic": sharing})


def _pairs(nodes: Sequence[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs within and between nodes, evenly picked where there are many."""
    count = len(nodes)
    every = [(a, b) for a in range(count) for b in range(a + 1, count)]
    inside = [pair for pair in every if nodes[pair[0]] == nodes[pair[1]]]
    between = [pair for pair in every if nodes[pair[0]] != nodes[pair[1]]]
    return _thin(inside), _thin(between)


def _thin(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    if len(pairs) <= MOST_PAIRS:
        return pairs
    return [pairs[i * len(pairs) // MOST_PAIRS] for i in range(MOST_PAIRS)]


def _measure(pair: tuple[int, int], rank: int, place: torch.device) -> tuple[float, float]:
    """Latency and bandwidth as the first rank of the pair sees them; the others wait."""
    dist.barrier()
    if rank not in pair:
        return 0.0, 0.0
    peer = pair[1] if rank == pair[0] else pair[0]
    latency = min(_ping_pong(1, LATENCY_ROUNDS, peer, rank == pair[0], place))
    small, large = (
        min(_ping_pong(size, LARGE_ROUNDS, peer, rank == pair[0], place)) for size in LARGE_BYTES
    )
    slope = (large - small) / (LARGE_BYTES[1] - LARGE_BYTES[0])
    # A noisy clock can make the slope vanish; the large message alone bounds the bandwidth.
    return latency, 1.0 / max(slope, large / LARGE_BYTES[1] / 4)


def _ping_pong(size: int, rounds: int, peer: int, first: bool, place: torch.device) -> list[float]:
    """Half the round-trip times of ``rounds`` exchanges, after two that do not count."""
    message = torch.zeros(size, dtype=torch.uint8, device=place)
    times: list[float] = []
    for _ in range(rounds + 2):
        _synchronize(place)
        start = time.perf_counter()
        if first:
            dist.send(message, peer)
            dist.recv(message, peer)
        else:
            dist.recv(message, peer)
            dist.send(message, peer)
        _synchronize(place)
        times.append((time.perf_counter() - start) / 2)
    return times[2:]


def _devices_per_nic(
    nodes: Sequence[int], links: Sequence[LinkMeasurement], rank: int, place: torch.device
) -> int:
    """How many devices of a node share a card: pairs between two nodes send at the same time.

    ``k`` pairs that each reach a share ``s`` of what one pair reaches alone use ``k * s``
    cards, so ``1 / s`` devices share one.
    """
    alone = [link.bandwidth for link in links if not link.within_node]
    here = [i for i, node in enumerate(nodes) if node == 0]
    there = [i for i, node in enumerate(nodes) if node == 1]
    count = min(len(here), len(there))
    if not alone or count < 2:
        return 1
    pairs = list(zip(here[:count], there[:count], strict=True))
    dist.barrier()
    mine = [pair for pair in pairs if rank in pair]
    took = 0.0
    if mine:
        first, second = mine[0]
        peer = second if rank == first else first
        took = median(_ping_pong(LARGE_BYTES[1], LARGE_ROUNDS, peer, rank == first, place))
    together = [
        LARGE_BYTES[1] / seconds
        for seconds in (_share((took, 0.0), pair[0], place)[0] for pair in pairs)
    ]
    share = median(together) / median(alone)
    return min(count, max(1, round(1.0 / share))) if math.isfinite(share) else 1


def _share(values: tuple[float, float], source: int, place: torch.device) -> tuple[float, float]:
    """The values of rank ``source``, on every rank."""
    tensor = torch.tensor(values, dtype=torch.float64, device=place)
    dist.broadcast(tensor, source)
    first, second = tensor.tolist()
    return first, second


def _gather_text(text: str, place: torch.device) -> list[str]:
    """The texts of all ranks, as padded bytes: nothing is pickled."""
    data = text.encode()[:_REPORT_BYTES].ljust(_REPORT_BYTES)
    mine = torch.tensor(list(data), dtype=torch.uint8, device=place)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return [bytes(item.tolist()).decode().rstrip() for item in every]


def _synchronize(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
