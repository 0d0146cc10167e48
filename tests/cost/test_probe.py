"""Measuring links between running ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from graphpipe.cost import probe as probe_module
from graphpipe.cost.cluster import Cluster
from graphpipe.cost.probe import LinkMeasurement, probe
from graphpipe.errors import ClusterError


def _work(rank: int, hosts: tuple[str, ...], folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), len(hosts))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(hosts))
    try:
        # Small messages and few rounds: what is tested is the protocol, not this machine.
        probe_module.LATENCY_ROUNDS = probe_module.LARGE_ROUNDS = 2
        probe_module.LARGE_BYTES = (2**10, 2**16)
        found = probe("cpu", host=hosts[rank])
        found.cluster.save(folder / f"{rank}.json")
        (folder / f"{rank}.toml").write_text(found.toml(), encoding="utf-8")
    except ClusterError as error:
        (folder / f"{rank}.error").write_text(str(error), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def _run(hosts: tuple[str, ...], folder: Path) -> None:
    mp.start_processes(_work, args=(hosts, folder), nprocs=len(hosts), start_method="fork")


def test_two_nodes_of_two(tmp_path: Path) -> None:
    _run(("left", "left", "right", "right"), tmp_path)
    cluster = Cluster.load(tmp_path / "0.json")
    assert [device.node for device in cluster.devices] == [0, 0, 1, 1]
    assert cluster.kinds == ("cpu-core",)
    for source, target in ((0, 1), (0, 2)):
        latency, bandwidth = cluster.link(source, target)
        assert 0 < latency < 1
        assert bandwidth is not None
        assert 1e5 < bandwidth < 1e13
    assert 1 <= cluster.network.devices_per_nic <= 2
    for rank in range(1, 4):
        assert Cluster.load(tmp_path / f"{rank}.json") == cluster
    assert Cluster.load(tmp_path / "0.toml") == cluster
    text = (tmp_path / "0.toml").read_text(encoding="utf-8")
    assert "# rank 2: right" in text
    assert text.count(" GB/s") == 6


def test_one_rank_has_no_links(tmp_path: Path) -> None:
    _run(("alone",), tmp_path)
    cluster = Cluster.load(tmp_path / "0.json")
    assert cluster.world_size == 1
    assert cluster.network.intra_node_bandwidth is None


def test_scattered_ranks_are_refused_on_every_rank(tmp_path: Path) -> None:
    _run(("left", "right", "left"), tmp_path)
    for rank in range(3):
        assert "must follow one another" in (tmp_path / f"{rank}.error").read_text()


def test_without_a_process_group() -> None:
    with pytest.raises(ClusterError, match="torchrun"):
        probe()


def test_many_pairs_are_thinned_evenly() -> None:
    nodes = [rank // 8 for rank in range(64)]
    inside, between = probe_module._pairs(nodes)
    assert len(inside) == len(between) == probe_module.MOST_PAIRS
    assert all(nodes[a] == nodes[b] for a, b in inside)
    assert all(nodes[a] != nodes[b] for a, b in between)
    assert len({nodes[a] for a, _ in inside}) > 4


def test_each_class_of_links_has_its_median() -> None:
    links = [LinkMeasurement(0, i, True, i * 1e-6, i * 1e9) for i in (1, 2, 9)]
    links.append(LinkMeasurement(0, 4, False, 5e-5, 1e8))
    network = probe_module._network(links, 3)
    assert (network.intra_node_latency, network.intra_node_bandwidth) == (2e-6, 2e9)
    assert (network.inter_node_latency, network.inter_node_bandwidth) == (5e-5, 1e8)
    assert network.devices_per_nic == 3
