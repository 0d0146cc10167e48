"""One small captured model that several test files share."""

from __future__ import annotations

import functools

import torch
from torch import nn

from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph


class Small(nn.Module):
    """A layer without gradients around a constant, BatchNorm, a mask, dropout of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first_copy = nn.Parameter(torch.eye(4))

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        h = self.first(x)
        with torch.no_grad():
            shift = h.sum(1, keepdim=True) * torch.tensor(0.5)
        h = self.norm(h + shift)
        h = nn.functional.dropout(self.second(h), 0.0)
        return {"h": h.squeeze(), "rows": x.shape[0], "name": "small"}


@functools.lru_cache
def small() -> tuple[Small, ModelGraph]:
    model = Small()
    graph = capture(
        model,
        (torch.randn(4, 3),),
        targets=torch.randn(4, 4),
        loss_fn=lambda out, want: ((out["h"] - want) ** 2).mean(),
        name="small",
    )
    return model, graph
