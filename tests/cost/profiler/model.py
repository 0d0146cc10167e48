"""A small model that has one of each kind of op that is hard to profile."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.nn import functional

from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph

WIDTH = 16


class Hard(nn.Module):
    """Embedding bag, convolution, BatchNorm, in-place ReLU, attention, chunk, dropout, frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, WIDTH, mode="sum")
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.twins = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.dropout = nn.Dropout(0.1)

    def forward(self, words: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        bags = self.bag(words)
        y = functional.relu(self.norm(self.conv(x)), inplace=True)
        q, k, v = self.qkv(y.transpose(1, 2)).chunk(3, dim=-1)
        z = functional.scaled_dot_product_attention(q, k, v)
        z = self.dropout(z) + self.frozen(x.transpose(1, 2))
        for twin in self.twins:
            z = z + torch.tanh(twin(z))
        return z.mean(1) + bags


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy over the features."""
    return functional.cross_entropy(output, target)


@cache
def hard_graph() -> ModelGraph:
    """The model and its loss, captured."""
    torch.manual_seed(0)
    words = torch.randint(0, 50, (4, 7))
    x = torch.randn(4, WIDTH, 5)
    return capture(Hard(), (words, x), targets=torch.randint(0, WIDTH, (4,)), loss_fn=loss_fn)
