"""Presets for common boxes, as data in ``boxes.toml``, and the short names of clusters."""

from __future__ import annotations

import difflib
import re
import tomllib
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING

from pydantic import Field

from graphpipe.cost.cluster import Cluster, Network
from graphpipe.errors import ClusterError
from graphpipe.records import Record

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_DEVICES = 100_000


class Box(Record):
    """One box.

    Attributes:
        source: Where the figures come from.
        device: Name in the device catalogue.
        devices: How many of them.
        network: Links within the box, and between boxes of this kind.
    """

    source: str
    device: str
    devices: int = Field(ge=1)
    network: Network


@lru_cache(maxsize=1)
def boxes() -> Mapping[str, Box]:
    """All presets by name."""
    text = resources.files(__package__).joinpath("boxes.toml").read_text(encoding="utf-8")
    return {name: Box.model_validate(table) for name, table in tomllib.loads(text).items()}


def preset(name: str, nodes: int = 1) -> Cluster:
    """A cluster of ``nodes`` boxes of a kind, such as ``preset("dgx-h100", 4)``.

    Raises:
        ClusterError: for an unknown box or a senseless number.
    """
    known = boxes()
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
        raise ClusterError(
            "Unknown box",
            expected="one of " + ", ".join(sorted(known)),
            got=repr(name),
            fix=f"Did you mean {' or '.join(near)}" if near else "Describe it in a TOML file",
        )
    box = known[name]
    _check_count(nodes, box.devices, f"{nodes}x{name}")
    cluster = Cluster.uniform(box.device, nodes=nodes, per_node=box.devices, network=box.network)
    return cluster.model_copy(update={"name": f"{nodes}x{name}"})


def named_cluster(text: str) -> Cluster:
    """A cluster from a short name: ``dgx-a100``, ``4xdgx-a100``, or ``NODESxPER_NODExDEVICE``.

    ``2x8xv100-16gb`` is two nodes of eight V100, linked as the catalogue says. Anything that
    ends in ``.toml`` or ``.json`` is a file.

    Raises:
        ClusterError: if it is none of these.
        FileFormatError: if the file is malformed.
    """
    if text.endswith((".toml", ".json")):
        return Cluster.load(text)
    counts = re.match(r"(?:(\d{1,9})x)?(?:(\d{1,9})x)?", text)
    assert counts is not None
    name = text[counts.end() :]
    first, second = counts[1], counts[2]
    if second is not None:
        nodes, per_node = int(first), int(second)
        _check_count(nodes, per_node, text)
        return Cluster.uniform(name, nodes=nodes, per_node=per_node)
    return preset(name, int(first) if first is not None else 1)


def _check_count(nodes: int, per_node: int, text: str) -> None:
    if nodes < 1 or per_node < 1 or nodes * per_node > MOST_DEVICES:
        raise ClusterError(
            "Not a number of devices", expected=f"1 to {MOST_DEVICES} in all", got=repr(text)
        )
