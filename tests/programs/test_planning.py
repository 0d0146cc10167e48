"""From names to planner input; what the commands' tests do not reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphpipe.cost.boxes import named_cluster
from graphpipe.errors import ClusterError
from graphpipe.programs.planning import Hardware, capture_job, summary
from graphpipe.zoo.registry import ZOO


def test_devices_fill_nodes_of_eight() -> None:
    found = Hardware(device="l4", devices=16).build()
    assert [len(node) for node in found.nodes] == [8, 8]
    assert [len(node) for node in Hardware(device="l4", devices=6).build().nodes] == [6]
    assert [len(n) for n in Hardware(device="l4", devices=6, per_node=2).build().nodes] == [2] * 3


def test_memory_replaces_that_of_the_devices(tmp_path: Path) -> None:
    assert Hardware(device="l4", devices=2, memory_gib=1.5).build().devices[0].memory_bytes == (
        1_610_612_736
    )
    path = tmp_path / "cluster.toml"
    named_cluster("1x2xl4").save(path)
    found = Hardware(cluster=str(path), memory_gib=1).build()
    assert {device.memory_bytes for device in found.devices} == {2**30}
    assert found.network == named_cluster("1x2xl4").network


def test_contradiction() -> None:
    with pytest.raises(ClusterError, match="were both given"):
        Hardware(cluster="1x2xl4", devices=2).build()


def test_summary_names_what_mixes_samples_and_what_is_frozen() -> None:
    text = summary(capture_job(ZOO["clip-tiny"].make()))
    assert "clip-tiny: " in text
    assert "mix the samples" in text
    assert "(coupled)" in text
    assert "frozen" not in text
