"""Presets and the short names of clusters."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphpipe.cost.boxes import named_cluster, preset
from graphpipe.cost.cluster import Cluster
from graphpipe.errors import ClusterError


def test_boxes_as_documented() -> None:
    summit = preset("summit", 2)
    assert summit.world_size == 12
    assert summit.kinds == ("v100-16gb",)
    assert summit.link(0, 5)[1] == 50e9
    assert summit.link(0, 6)[1] == 12.5e9
    assert summit.nics[2:4] == ((0, 0), (0, 1))
    assert preset("cloud-8xl4").kinds == ("l4",)
    assert preset("dgx-a100").link(0, 7)[1] == 300e9


def test_short_names(tmp_path: Path) -> None:
    assert named_cluster("dgx-h100") == preset("dgx-h100")
    assert named_cluster("4xdgx-h100") == preset("dgx-h100", 4)
    assert named_cluster("cloud-8xl4") == preset("cloud-8xl4")
    want = Cluster.uniform("v100-16gb", nodes=2, per_node=8)
    assert named_cluster("2x8xv100-16gb") == want
    for name in ("c.toml", "c.json"):
        want.save(tmp_path / name)
        assert named_cluster(str(tmp_path / name)) == want


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dgx-h10", "Did you mean dgx-h100"),
        ("zzzz", "Describe it in a TOML file"),
        ("", "Unknown box"),
        ("0xdgx-h100", "Not a number of devices"),
        ("99999xdgx-h100", "Not a number of devices"),
        ("0x8xl4", "Not a number of devices"),
        ("2x8xabacus", "Unknown device"),
    ],
)
def test_wrong_names(name: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        named_cluster(name)
