"""Small models with a linear over a concatenation of branches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from tests.graph.eager import run_program

Between = Callable[[torch.Tensor, "Joined"], torch.Tensor]


class Joined(nn.Module):
    """Branches of several widths, what happens to their concatenation, a linear, a head."""

    def __init__(
        self,
        between: Between = lambda x, _: x,
        widths: tuple[int, ...] = (4, 3, 5),
        *,
        bias: bool = True,
        inplace: bool = False,
    ) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(6, width), nn.ReLU(inplace=inplace)) for width in widths
        )
        self.between = between
        self.factor = nn.Parameter(torch.ones(()))
        self.join = nn.Linear(sum(widths), 8, bias=bias)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([branch(x) for branch in self.branches], -1)
        out: torch.Tensor = self.head(self.join(self.between(joined, self)).tanh())
        return out


def batch(samples: int = 6, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """(input, target) of a mini-batch."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=generator, dtype=dtype)
    return x, torch.randn(samples, 2, generator=generator, dtype=dtype)


def captured(model: nn.Module, *, training: bool = True) -> ModelGraph:
    """The graph of a model with :func:`batch` and the mean squared error."""
    x, target = batch(dtype=next(model.parameters()).dtype)
    return capture(model, (x,), targets=target, loss_fn=functional.mse_loss, training=training)


def gradients(graph: ModelGraph) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of a graph's program; slices put together under the whole's name."""
    assert graph.program is not None
    state = graph.program.state
    for value in state.values():
        value.grad = None
    dtype = next(v.dtype for v in state.values())
    x, target = batch(dtype=dtype)
    loss, _ = run_program(graph, (x,), None, target)
    assert loss is not None
    loss.backward()
    out: dict[str, Any] = {}
    for item in graph.parameters:
        gradient = state[item.name].grad
        if gradient is None:
            continue
        if item.slice is None:
            out[item.name] = gradient
            continue
        part = item.slice
        whole = out.setdefault(part.of, torch.full(part.full_shape, torch.nan, dtype=dtype))
        whole.narrow(part.dim, part.start, part.length).copy_(gradient)
    return loss.detach(), copy.deepcopy(out)
