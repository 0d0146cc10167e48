"""How long an optimizer step takes, per parameter and per byte of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from graphpipe.cost.profiler.evict import Evictor
from graphpipe.cost.profiler.timing import Clock
from graphpipe.graph.model_graph import ModelGraph

MOST_BYTES = 32 * 2**20
"""At most so many bytes of parameters are stepped; their gradients and state come on top."""
LARGEST_BYTES = 8 * 2**20
"""A larger parameter is stood for by one of this size, which no cache holds either."""
_TINY = 64
_STEPS = 4

_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-6),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, 1e-6, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 1e-6),
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-6),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-6),
}


class OptimizerCosts(NamedTuple):
    """A step takes ``per_byte * bytes + per_tensor * parameters`` seconds."""

    per_byte: float
    per_tensor: float

    def without_first(self, additions: Sequence[tuple[int, float]], least: float) -> OptimizerCosts:
        """With one addition of every parameter's gradient taken off, never below zero.

        The backward of every micro-batch is charged with adding its gradients into ``.grad``.
        The first of an iteration finds none there and only hands its gradient over, so the
        iteration as a whole has one addition less.

        Args:
            additions: (bytes, seconds of the addition) of every trainable parameter.
            least: Seconds of the addition of one element.
        """
        nbytes = sum(size for size, _ in additions)
        beyond = sum(max(0.0, seconds - least) for _, seconds in additions)
        per_byte = beyond / nbytes if nbytes else 0.0
        return OptimizerCosts(max(0.0, self.per_byte - per_byte), max(0.0, self.per_tensor - least))


def optimizer_costs(
    name: str, graph: ModelGraph, device: torch.device, clock: Clock, evictor: Evictor
) -> OptimizerCosts:
    """Measures steps of an optimizer on parameters as large as the model's.

    The time per parameter comes from parameters of one element, where nothing else matters;
    the time per byte is what the model's own sizes take beyond it, since a step over a
    parameter that fits into a cache takes less per byte than one over a large parameter.

    Args:
        name: Of the optimizers that ``ParameterMemory.for_optimizer`` knows; others: AdamW.
        graph: Whose trainable parameters are stepped; a sample of them where they are large.
        device: Where.
        clock: Of the device.
        evictor: Makes caches as cold as the rest of the model would.

    Returns:
        Zeros for a model without trainable parameters.
    """
    sizes = _sample([p.numel for p in graph.parameters if p.trainable and not p.is_buffer])
    if not sizes:
        return OptimizerCosts(0.0, 0.0)
    make = _OPTIMIZERS.get(name, _OPTIMIZERS["adamw"])
    per_tensor = _step_seconds(make, [1] * _TINY, device, clock, evictor) / _TINY
    seconds = _step_seconds(make, sizes, device, clock, evictor)
    return OptimizerCosts(
        max(0.0, seconds - per_tensor * len(sizes)) / (4 * sum(sizes)), per_tensor
    )


def _sample(sizes: Sequence[int]) -> list[int]:
    """Every n-th size, so that all stay below :data:`MOST_BYTES`."""
    capped = [min(size, LARGEST_BYTES // 4) for size in sorted(sizes) if size]
    every = -(-sum(capped) * 4 // MOST_BYTES) if capped else 1
    return capped[::-1][:: max(1, every)]


def _step_seconds(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    sizes: Sequence[int],
    device: torch.device,
    clock: Clock,
    evictor: Evictor,
) -> float:
    """The fastest of a few steps over float32 parameters of these sizes."""
    parameters = [nn.Parameter(torch.full((size,), 0.5, device=device)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = make(parameters)
    optimizer.step()
    times: list[float] = []
    for _ in range(_STEPS):
        evictor.evict()
        times.append(clock.time(optimizer.step)[0])
    return min(times)
