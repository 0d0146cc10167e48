"""Small models of every shape that a stage graph can have, each with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional


@dataclass
class Example:
    """A model with one mini-batch."""

    model: nn.Module
    args: tuple[Any, ...]
    targets: Any
    loss_fn: Callable[..., Any]
    kwargs: dict[str, Any] = field(default_factory=dict)


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, target)


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output, target)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 8)
        self.d = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.c(self.b(self.a(x).tanh()).tanh()).tanh())


class Diamond(nn.Module):
    """Stem, two branches, head: what torch's own pipelining gets wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x).relu()
        return self.head(torch.cat([self.a(h).relu(), self.b(h).tanh()], 1))


class Unequal(nn.Module):
    """Three branches of 1, 2 and 3 layers, each from an input of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Linear(4, 5)
        self.q = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5))
        self.r1 = nn.Linear(6, 5)
        self.r2 = nn.Linear(5, 5)
        self.r3 = nn.Linear(5, 5)
        self.join = nn.Linear(15, 2)

    def forward(self, x: torch.Tensor, *, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        r = self.r3(self.r2(self.r1(z).tanh()).tanh())
        return self.join(torch.cat([self.p(x), self.q(y), r], 1).relu())


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 8)
        self.d = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x).tanh()
        c = self.c(self.b(a).tanh()).tanh()
        return self.d(a + c)


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.middle(self.embedding(ids)).tanh()
        return self.head(hidden).transpose(1, 2)


class Frozen(nn.Module):
    """A frozen tower beside a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.trained = nn.Linear(5, 4)
        self.head = nn.Linear(8, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.frozen(x), self.trained(y).tanh()], 1))


class Several(nn.Module):
    """Two heads; an auxiliary loss in the middle and a penalty on a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.middle = nn.Linear(8, 8)
        self.first = nn.Linear(8, 3)
        self.second = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.body(x).tanh()
        m = self.middle(h).tanh()
        penalty = self.second.weight.square().sum()
        return {"first": self.first(m), "second": self.second(h), "penalty": penalty}


def several_losses(output: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> Any:
    return (
        functional.cross_entropy(output["first"], target["label"])
        + 0.3 * functional.mse_loss(output["second"], target["value"])
        + 0.01 * output["penalty"]
    )


class Whole(nn.Module):
    """A tensor without a batch dimension, made from a parameter, that other stages read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 8) / 3)
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.tanh(self.table @ self.table.t())
        h = self.a(x).tanh() @ mixed
        return self.b(h) + mixed[0, :3]


class Types(nn.Module):
    """Integer, boolean and bf16 tensors between stages, without a gradient of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 8)
        self.table = nn.Embedding(8, 3)
        self.c = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        best = h.argmax(1)
        mask = h > 0
        low = h.to(torch.bfloat16)
        g = self.b(torch.where(mask, h, 0.1 * h)) + low.float()
        return self.c(g.tanh()) + self.table(best)


def build(name: str, samples: int = 12, dtype: torch.dtype = torch.float32) -> Example:
    """The example called ``name``, the same at every call."""
    torch.manual_seed(len(name))
    n = samples

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype)

    labels = torch.randint(0, 3, (n,))
    if name == "chain":
        example = Example(Chain(), (rand(n, 6),), labels, cross_entropy)
    elif name == "diamond":
        example = Example(Diamond(), (rand(n, 6),), labels, cross_entropy)
    elif name == "unequal":
        kwargs = {"y": rand(n, 3), "z": rand(n, 6)}
        example = Example(Unequal(), (rand(n, 4),), rand(n, 2), mean_square, kwargs)
    elif name == "skip":
        example = Example(Skip(), (rand(n, 6),), labels, cross_entropy)
    elif name == "tied":
        ids = torch.randint(0, 11, (n, 5))
        following = ids.roll(-1, 1)
        following[0, 2:] = -100  # uneven counts of tokens
        following[-1, 1:] = -100
        example = Example(Tied(), (ids,), following, cross_entropy)
    elif name == "frozen":
        example = Example(Frozen(), (rand(n, 6), rand(n, 5)), labels, cross_entropy)
    elif name == "several":
        targets = {"label": labels, "value": rand(n, 2)}
        example = Example(Several(), (rand(n, 6),), targets, several_losses)
    elif name == "whole":
        example = Example(Whole(), (rand(n, 6),), labels, cross_entropy)
    else:
        assert name == "types"
        example = Example(Types(), (rand(n, 6),), labels, cross_entropy)
    example.model.to(dtype)
    return example
