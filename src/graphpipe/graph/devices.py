"""Devices in a captured graph.

A capture knows one device, the CPU, whatever the model was on. A stage runs on one device
as well, so every device that occurs in its graph becomes that one: in ops that create
tensors, in ``.to(device)``, and in autocast regions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphpipe.graph.autocast import call_under_autocast


def place_on(graph: fx.Graph, device: torch.device | str) -> None:
    """Makes every op of ``graph`` create and keep its tensors on ``device`` (in place).

    The graph's parameters and inputs must already be there.
    """
    for node in graph.nodes:
        place_node_on(node, torch.device(device))


def place_node_on(node: fx.Node, device: torch.device) -> None:
    """Makes one op create and keep its tensors on ``device``."""

    def swap(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    if node.op != "call_function":
        return
    node.args = fx.node.map_aggregate(node.args, swap)
    node.kwargs = fx.node.map_aggregate(node.kwargs, swap)
    if node.target is call_under_autocast:
        _device_type, *rest = node.args
        node.args = (device.type, *rest)
