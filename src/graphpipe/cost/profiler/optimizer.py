"""How long an optimizer step takes, per byte of parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from graphpipe.cost.profiler.timing import Clock

_MEASURED_BYTES = 2**23
_PARTS = 4

_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-6),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, 1e-6, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 1e-6),
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-6),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-6),
}


def optimizer_seconds_per_byte(name: str, device: torch.device, clock: Clock) -> float:
    """Seconds per byte of float32 parameters of one step, the smallest of four steps.

    Args:
        name: Of the optimizers that ``ParameterMemory.for_optimizer`` knows; others: AdamW.
        device: Where.
        clock: Of the device.
    """
    make = _OPTIMIZERS.get(name, _OPTIMIZERS["adamw"])
    count = _MEASURED_BYTES // 4 // _PARTS
    parameters = [nn.Parameter(torch.full((count,), 0.5, device=device)) for _ in range(_PARTS)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = make(parameters)
    optimizer.step()
    times = [clock.time(optimizer.step)[0] for _ in range(4)]
    return min(times) / _MEASURED_BYTES
