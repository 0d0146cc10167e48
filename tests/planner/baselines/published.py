"""The least that the tests need of the published profiles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from graphpipe.cost.published.load import load_piper_file
from graphpipe.planner.baselines.inputs import piper_input_of_file
from graphpipe.planner.baselines.pipedream import NodeCosts
from graphpipe.planner.baselines.piper import PiperInput
from tests.samples import profiles_dir


class Profile(NamedTuple):
    """Costs and edges of a PipeDream profile, nodes in a topological order."""

    costs: NodeCosts
    edges: tuple[tuple[int, int], ...]


def pipedream_profile(name: str) -> Profile:
    """Reads a profile; input nodes and unused outputs are left out, as the original does."""
    rows: dict[str, tuple[str, float, float, float]] = {}
    edges: list[tuple[str, str]] = []
    for line in (profiles_dir() / "pipedream" / name).read_text().splitlines():
        fields = line.strip().split(" -- ")
        if line.startswith("\t"):
            edges.append((fields[0], fields[1]))
        elif line.strip():
            values = dict(item.split("=") for item in fields[2].split(", "))
            seconds = float(values["forward_compute_time"]) + float(values["backward_compute_time"])
            sent = sum(float(x) for x in values["activation_size"].strip("[]").split(";"))
            rows[fields[0]] = (fields[1], seconds / 1e3, float(values["parameter_size"]), sent)
    targets, sources = {b for _, b in edges}, {a for a, _ in edges}
    for node, row in list(rows.items()):
        unused = row[0].startswith("__getitem__") and node not in sources
        if unused or (row[0].startswith("Input") and node not in targets):
            del rows[node]
    edges = [(a, b) for a, b in edges if a in rows and b in rows]
    order: list[str] = []
    while len(order) < len(rows):
        waiting = {b for a, b in edges if a not in order}
        order += [node for node in rows if node not in order and node not in waiting]
    place = {node: i for i, node in enumerate(order)}
    table = np.array([rows[node][1:] for node in order])
    numbered = tuple((place[a], place[b]) for a, b in edges)
    return Profile(NodeCosts(table[:, 0], table[:, 1], table[:, 2]), numbered)


def piper_profile(name: str, *, memory_bytes: float, bandwidth: float) -> PiperInput:
    """Reads an input of Piper's."""
    file = load_piper_file(profiles_dir() / "piper" / name)
    return piper_input_of_file(file, memory_bytes=memory_bytes, bandwidth=bandwidth)
