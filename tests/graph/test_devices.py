"""A captured graph on another device."""

from __future__ import annotations

import torch
from torch import fx, nn

from graphpipe.graph.autocast import call_under_autocast, operator_of
from graphpipe.graph.capture import capture
from graphpipe.graph.devices import place_on


class Creates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            h = self.linear(x)
        return h.to(x.device) + torch.arange(3, device=x.device)


def test_every_device_in_a_graph_becomes_the_stages_own() -> None:
    graph = capture(Creates(), (torch.zeros(2, 3),), loss_fn=lambda out: out.sum())
    assert graph.program is not None
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph.program.module.graph, {}))
    place_on(copy, "meta")
    devices = {
        value
        for node in copy.nodes
        for value in (*node.args, *node.kwargs.values())
        if isinstance(value, torch.device)
    }
    assert devices == {torch.device("meta")}
    regions = [node for node in copy.nodes if node.target is call_under_autocast]
    assert {node.args[0] for node in regions} == {"meta"}
    assert operator_of(regions[0])[0] is torch.ops.aten.linear.default


def test_an_op_is_called_under_the_regions_autocast() -> None:
    x = torch.ones(2, 2)
    linear = torch.ops.aten.linear.default
    assert call_under_autocast("cpu", torch.bfloat16, True, linear, x, x).dtype is torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call_under_autocast("cpu", None, False, linear, x, x).dtype is torch.float32
