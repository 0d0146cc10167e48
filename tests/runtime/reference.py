"""Other references than full-batch training."""

from __future__ import annotations

import copy

import torch

from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from tests.runtime.equality import History, Optimizer, halves
from tests.runtime.models import Example


def captured(made: Example) -> tuple[Example, ModelGraph]:
    """An example and its graph."""
    graph = capture(made.model, made.args, made.kwargs, targets=made.targets, loss_fn=made.loss_fn)
    return made, graph


def micro_batch_loop(
    made: Example, optimizer: Optimizer, steps: int, *, micro_batch: int
) -> tuple[History, dict[str, torch.Tensor]]:
    """Plain training that accumulates micro-batches of a mean loss."""
    model = copy.deepcopy(made.model)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    chosen = optimizer(named)
    history: History = []
    for step in range(steps):
        batch = halves(made, step)
        chosen.zero_grad()
        (x,) = batch.args
        total = 0.0
        for start in range(0, len(x), micro_batch):
            part = slice(start, start + micro_batch)
            loss = made.loss_fn(model(x[part]), batch.targets[part])
            weighted = loss * (len(x[part]) / len(x))
            weighted.backward()
            total += float(weighted.detach())
        gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
        chosen.step()
        history.append((total, gradients))
    return history, {name: value.clone() for name, value in model.state_dict().items()}
