"""Clusters: links, network cards and all-reduce times."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphpipe.cost.cluster import Cluster, Device, Network, NodeLink
from graphpipe.errors import FileFormatError

NET = Network(
    intra_node_bandwidth=100.0,
    intra_node_latency=1.0,
    inter_node_bandwidth=10.0,
    inter_node_latency=5.0,
    devices_per_nic=2,
)


def _cluster(nodes: int = 2, per_node: int = 4, **changes: object) -> Cluster:
    devices = tuple(
        Device(kind="x", memory_bytes=1, node=node)
        for node in range(nodes)
        for _ in range(per_node)
    )
    return Cluster(devices=devices, network=NET.model_copy(update=changes))


def test_links() -> None:
    cluster = _cluster()
    assert cluster.link(0, 3) == (1.0, 100.0)
    assert cluster.link(3, 4) == (5.0, 10.0)
    assert cluster.transfer_ns(3, 4, 25.0) == 2_500_000_000
    assert cluster.latency_ns(0, 1) == 1_000_000_000
    assert _cluster(intra_node_bandwidth=None).transfer_ns(0, 1, 1e9) == 0
    assert cluster.nodes == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert cluster.nics == ((0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0), (1, 1), (1, 1))


def test_a_node_may_have_links_of_its_own() -> None:
    plain = _cluster()
    links = (None, NodeLink(bandwidth=400.0, latency=0.5))
    cluster = Cluster(devices=plain.devices, network=NET, node_links=links)
    assert cluster.link(0, 1) == (1.0, 100.0)
    assert cluster.link(4, 7) == (0.5, 400.0)
    assert cluster.link(0, 4) == (5.0, 10.0)
    assert cluster.all_reduce_seconds((4, 5), 800.0) == pytest.approx(800 / 400 + 2 * 0.5)
    with pytest.raises(ValueError, match="1 entries for 2 nodes"):
        Cluster(devices=plain.devices, network=NET, node_links=(None,))


def test_all_reduce_within_a_node_is_a_ring() -> None:
    cluster = _cluster()
    assert cluster.all_reduce_seconds((2,), 1e9) == 0.0
    want = 2 * 3 / 4 * 1000 / 100 + 2 * 3 * 1.0
    assert cluster.all_reduce_seconds((0, 1, 2, 3), 1000.0) == pytest.approx(want)


def test_all_reduce_between_single_ranks_is_a_ring_over_the_cards() -> None:
    want = 2 * 1 / 2 * 1000 / 10 + 2 * 5.0
    assert _cluster().all_reduce_seconds((0, 4), 1000.0) == pytest.approx(want)
    # One rank here, two there: nothing to scatter on the first node.
    want = 2 * 2 / 3 * 1000 / 10 + 2 * 2 * 5.0
    assert _cluster().all_reduce_seconds((0, 4, 5), 1000.0) == pytest.approx(want)


def test_all_reduce_over_whole_nodes_is_hierarchical() -> None:
    # Within: 2 * 3/4 * 1000/100 + 6 * 1. Between: a quarter each, two ranks on each card.
    inside = 2 * 3 / 4 * 1000 / 100 + 6 * 1.0
    between = 2 * 1 / 2 * (1000 / 4 * 2) / 10 + 2 * 5.0
    cluster = _cluster()
    assert cluster.all_reduce_seconds(tuple(range(8)), 1000.0) == pytest.approx(inside + between)
    # With a card for each device the parts cross side by side.
    own = _cluster(devices_per_nic=1).all_reduce_seconds(tuple(range(8)), 1000.0)
    assert own == pytest.approx(inside + between - 25.0)
    # With one card for all, crossing is as slow as one ring, whose latency is longer here.
    shared = _cluster(devices_per_nic=4).all_reduce_seconds(tuple(range(8)), 1000.0)
    assert own < cluster.all_reduce_seconds(tuple(range(8)), 1000.0) < shared


def test_all_reduce_needs_more_time_for_more_bytes_and_more_nodes() -> None:
    cluster = _cluster(nodes=4)
    times = [cluster.all_reduce_seconds(tuple(range(4 * n)), 1e4) for n in (1, 2, 3, 4)]
    assert times == sorted(times)
    assert cluster.all_reduce_seconds((0, 1), 2e4) > cluster.all_reduce_seconds((0, 1), 1e4)


def test_free_network() -> None:
    cluster = Cluster(devices=_cluster().devices)
    assert cluster.all_reduce_seconds(tuple(range(8)), 1e9) == 0.0


def test_nodes_must_be_numbered_without_gaps() -> None:
    devices = (Device(kind="x", memory_bytes=1, node=0), Device(kind="x", memory_bytes=1, node=2))
    with pytest.raises(ValueError, match="nodes must be numbered"):
        Cluster(devices=devices)


def test_json_round_trip(tmp_path: Path) -> None:
    cluster = _cluster()
    cluster.save(tmp_path / "c.json")
    assert Cluster.load(tmp_path / "c.json") == cluster
    text = (tmp_path / "c.json").read_text(encoding="utf-8")
    (tmp_path / "d.json").write_text(text.replace('"memory_bytes": 1', '"memory_bytes": 0', 1))
    with pytest.raises(FileFormatError, match=r"devices\.0\.memory_bytes"):
        Cluster.load(tmp_path / "d.json")
