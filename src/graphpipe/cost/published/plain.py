"""The plain cost graph: a JSON that a person can write by hand.

.. code-block:: json

    {"devices": 2, "device_memory": 16e9, "mini_batch": 8, "bandwidth": 12.5e9,
     "nodes": [{"id": "a", "fwd": 1.0, "bwd": 2.0,
                "param_bytes": 4e6, "act_bytes": 1e6, "out_bytes": 5e5}],
     "edges": [["a", "b"]]}

``fwd`` and ``bwd`` are milliseconds per sample, ``act_bytes`` (kept from forward to
backward) and ``out_bytes`` (sent to a consumer in another stage) bytes per sample,
``bandwidth`` bytes per second. A node whose ``bwd`` is 0 is frozen. Gradients and optimizer
state are not counted in memory. ``devices``, ``device_memory``, ``mini_batch``, ``micro_batch``
and ``bandwidth`` are defaults; null or missing: no limit, or to be given. A node's
``profile_error`` (a text with ``at batch N``) says that it cannot run with micro-batches of N
samples.
"""

from __future__ import annotations

import re

from graphpipe.cost.published.build import (
    MOST_DEVICES,
    MOST_SAMPLES,
    GraphDefaults,
    GraphFile,
    Node,
    build,
    memory_limit,
)
from graphpipe.cost.published.fields import Fields
from graphpipe.cost.table import ParameterMemory
from graphpipe.errors import FileFormatError


def read_plain(data: Fields, *, parameter_memory: ParameterMemory | None = None) -> GraphFile:
    """Reads a plain cost graph.

    Raises:
        FileFormatError: naming id and field.
    """
    defaults = GraphDefaults(
        devices=data.count("devices", largest=MOST_DEVICES),
        memory_bytes=memory_limit(data.positive("device_memory")),
        bandwidth=data.positive("bandwidth"),
        mini_batch=data.count("mini_batch", largest=MOST_SAMPLES),
        micro_batch=data.count("micro_batch", largest=MOST_SAMPLES),
    )
    nodes = [_node(item) for item in data.objects("nodes", "node")]
    edges: list[tuple[str, str]] = []
    for i, item in enumerate(data.items("edges")):
        place = f"{data.where}, edges[{i}]"
        if not isinstance(item, list) or len(item) != 2:
            raise FileFormatError("An edge is a pair of ids", where=place, got=repr(item)[:60])
        pair = Fields({"source": item[0], "target": item[1]}, place)
        edge = (pair.identity("source"), pair.identity("target"))
        edges.append(edge)
    _refuse_repeats(edges, data.where)
    return build(
        data.text("name", default="graph") or "graph",
        nodes,
        edges,
        where=data.where,
        parameter_memory=parameter_memory or ParameterMemory(1.0, 0.0, 0.0),
        defaults=defaults,
    )


def _refuse_repeats(edges: list[tuple[str, str]], where: str) -> None:
    """In a file written by hand a repeated edge is a slip, and which one is meant is unknown."""
    seen: set[tuple[str, str]] = set()
    for source, target in edges:
        if (source, target) in seen:
            raise FileFormatError(
                f"The edge from '{source}' to '{target}' is there twice",
                where=f"{where}, edges",
                fix="Name each edge once; its bytes are the 'out_bytes' of the source",
            )
        seen.add((source, target))


def _node(item: Fields) -> Node:
    identity = item.identity("id")
    node = Fields(item.values, f"{item.where.rsplit(', nodes[', 1)[0]}, node '{identity}'")
    forward, backward = node.number("fwd"), node.number("bwd")
    return Node(
        id=identity,
        name=node.text("name"),
        forward=forward / 1e3,
        backward=backward / 1e3,
        trainable=backward > 0,
        parameter_bytes=node.number("param_bytes"),
        saved_bytes=node.number("act_bytes"),
        output_bytes=node.number("out_bytes"),
        excluded=_excluded(node),
    )


def _excluded(node: Fields) -> list[tuple[int, str]]:
    if "profile_error" not in node.values:
        return []
    reason = node.text("profile_error")
    found = re.search(r"\bat batch (\d{1,9})\b", reason)
    if found is None or int(found[1]) < 1:
        node.fail("profile_error", "The text names no batch", expected="'... at batch N'")
    return [(int(found[1]), reason)]
