"""Clusters as TOML."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphpipe.cost.boxes import boxes, preset
from graphpipe.cost.catalogue import device
from graphpipe.cost.cluster import Cluster, Device, NodeLink
from graphpipe.cost.cluster_file import read_toml, to_toml
from graphpipe.errors import ClusterError, FileFormatError

LAB = """
name = "lab"

[network]
intra_node_bandwidth = 300e9
intra_node_latency = 1e-5
inter_node_bandwidth = 25e9
inter_node_latency = 2e-5
devices_per_nic = 2

[[nodes]]
count = 2
device = "a100-80gb"
devices = 4

[[nodes]]
device = "npu"
devices = 2
memory_bytes = 16e9
intra_node_bandwidth = 50e9
"""


def test_nodes_of_several_kinds() -> None:
    cluster = read_toml(Cluster, LAB, where="lab.toml")
    assert cluster.name == "lab"
    assert [device.node for device in cluster.devices] == [0] * 4 + [1] * 4 + [2] * 2
    assert cluster.kinds == ("a100-80gb", "npu")
    assert cluster.devices[0].memory_bytes == device("a100-80gb").memory_bytes
    assert cluster.devices[9].memory_bytes == 16_000_000_000
    assert cluster.link(0, 1) == (1e-5, 300e9)
    assert cluster.link(8, 9) == (1e-5, 50e9)
    assert cluster.link(0, 9) == (2e-5, 25e9)


def test_without_a_network_the_catalogue_answers() -> None:
    text = '[[nodes]]\ndevice = "v100-16gb"\ndevices = 2\n[[nodes]]\nbox = "dgx-h100"\n'
    cluster = read_toml(Cluster, text, where="c.toml")
    assert cluster.world_size == 10
    assert cluster.link(0, 1)[1] == 50e9
    assert cluster.link(2, 9)[1] == 450e9
    # Between unlike nodes: the slower card.
    assert cluster.link(0, 9)[1] == 12.5e9
    assert cluster.network.devices_per_nic == 2


def test_round_trip(tmp_path: Path) -> None:
    for cluster in (read_toml(Cluster, LAB, where="x"), preset("summit", 3)):
        path = tmp_path / "c.toml"
        cluster.save(path)
        assert Cluster.load(path) == cluster
    assert "count = 3" in path.read_text(encoding="utf-8")
    assert to_toml(cluster, comment="a\nb").startswith("# a\n# b\n")


@pytest.mark.parametrize("name", sorted(boxes()))
def test_every_box_is_complete(name: str) -> None:
    cluster = preset(name, 2)
    assert len(boxes()[name].source) > 20
    assert len(cluster.nodes) == 2
    assert cluster.devices[0].memory_bytes == device(boxes()[name].device).memory_bytes


def test_what_does_not_fit_the_form_is_refused() -> None:
    mixed = (Device(kind="x", memory_bytes=1), Device(kind="y", memory_bytes=1))
    with pytest.raises(ClusterError, match=r"Save it as \.json"):
        to_toml(Cluster(devices=mixed))
    crossed = tuple(Device(kind="x", memory_bytes=1, node=node) for node in (0, 1, 0))
    with pytest.raises(ClusterError, match=r"Save it as \.json"):
        to_toml(Cluster(devices=crossed))
    links = (NodeLink(bandwidth=5.0),)
    text = to_toml(Cluster(devices=mixed[:1], node_links=links))
    assert read_toml(Cluster, text, where="x").node_links == links


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"npu"', '"abacus"\nfoo = 1', r"nodes\.1\.foo"),
        ("memory_bytes = 16e9", "", "'memory_bytes' are not given"),
        ("memory_bytes = 16e9", "memory_bytes = -1", r"nodes\.1\.memory_bytes"),
        ("memory_bytes = 16e9", "memory_bytes = inf", r"nodes\.1\.memory_bytes"),
        ("devices = 2\n", "devices = 0\n", r"nodes\.1\.devices"),
        ("devices = 2\n", "", r"nodes\.1'.*'devices'"),
        ("devices = 2\n", 'devices = "2"\n', r"nodes\.1\.devices"),
        ("count = 2", "count = 99999", r"Too many devices.*nodes\.0"),
        ('device = "npu"', 'box = "dgx-h100"', "is a box, or has"),
        ('device = "npu"\ndevices = 2', 'box = "tower"', "Unknown box"),
        ("inter_node_bandwidth = 25e9", "inter_node_bandwidth = 0", "inter_node_bandwidth"),
        ("devices_per_nic = 2", "devices_per_nic = 0", "devices_per_nic"),
        ("[network]", "[network", "not valid TOML"),
    ],
)
def test_malformed(old: str, new: str, message: str) -> None:
    assert old in LAB
    with pytest.raises(FileFormatError, match=message):
        read_toml(Cluster, LAB.replace(old, new), where="lab.toml")


def test_more_malformed(tmp_path: Path) -> None:
    unknown = '[[nodes]]\ndevice = "npu"\ndevices = 1\nmemory_bytes = 5\n'
    with pytest.raises(FileFormatError, match="does not know these devices"):
        read_toml(Cluster, unknown, where="x")
    with pytest.raises(FileFormatError, match="no bandwidth is known"):
        read_toml(Cluster, unknown + "intra_node_latency = 1.0\n[network]\n", where="x")
    with pytest.raises(FileFormatError, match="field 'nodes'"):
        read_toml(Cluster, "nodes = []", where="x")
    with pytest.raises(FileFormatError, match="Cannot read"):
        Cluster.load(tmp_path / "none.toml")
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(FileFormatError, match="not UTF-8"):
        Cluster.load(tmp_path / "x.toml")
