"""The optimizer of a rank, gradient clipping and loss scaling over all ranks.

Each rank optimises the parameters that it holds. What needs all of them, the norm of the
gradient and whether it overflowed, is reduced over all ranks, and a parameter that several
ranks hold counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from graphpipe.errors import RuntimeSetupError
from graphpipe.runtime.transport import Eventually, Transport

OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
PLACEHOLDER = "graphpipe.placeholder"
"""Name of the parameter that the optimizer of a rank without parameters gets."""


def build_optimizer(
    factory: OptimizerFactory,
    parameters: Mapping[str, nn.Parameter],
    device: torch.device,
) -> torch.optim.Optimizer:
    """Calls the user's factory with the rank's (name, parameter) pairs.

    A rank without parameters gets a real optimizer over one placeholder, so that learning
    rate schedulers and scalers work alike on every rank.

    Raises:
        RuntimeSetupError: if the factory does not return an optimizer, or returns one that
            needs a closure or all parameters at once (LBFGS).
    """
    named = list(parameters.items())
    if not named:
        named = [(PLACEHOLDER, nn.Parameter(torch.zeros(1, device=device)))]
    optimizer = factory(named)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RuntimeSetupError(
            "The optimizer factory did not return an optimizer",
            where="optimizer",
            expected="a torch.optim.Optimizer built from the (name, parameter) pairs it is given",
            got=type(optimizer).__name__,
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RuntimeSetupError(
            "LBFGS cannot train a pipeline: it evaluates the whole model several times a step",
            where="optimizer",
            fix="Use an optimizer that works parameter by parameter, such as AdamW or SGD",
        )
    mine = {id(parameter) for _, parameter in named}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in mine:
                raise RuntimeSetupError(
                    "The optimizer holds a parameter that this rank does not",
                    where="optimizer",
                    fix="Build it from the (name, parameter) pairs that the factory is given",
                )
    return optimizer


def gradient_norm(
    rank: int,
    transport: Transport,
    parameters: Mapping[str, nn.Parameter],
    owned: Collection[str],
    norm_type: float,
) -> Eventually[float]:
    """Norm of the whole model's gradient, the same on every rank (the generator's value).

    Args:
        rank: The rank.
        transport: Where the reduction goes.
        parameters: The rank's parameters by canonical name, with their summed gradients.
        owned: Names that this rank counts; each name is counted by one rank only.
        norm_type: p of the p-norm; ``inf`` for the largest absolute value.
    """
    squares: list[torch.Tensor] = []
    for name in owned:
        gradient = parameters[name].grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        if gradient.numel():
            squares.append(torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64))
    local = torch.zeros((), dtype=torch.float64)
    if squares:
        own = torch.linalg.vector_norm(torch.stack(squares), norm_type).cpu()
        local = own if math.isinf(norm_type) else own**norm_type
    total = local.reshape(1).clone()
    everyone = tuple(range(transport.world_size))
    op: Any = "max" if math.isinf(norm_type) else "sum"
    handle = transport.all_reduce(rank, everyone, total, op)
    while not handle.poll():
        yield
    value = float(total)
    return value if math.isinf(norm_type) else value ** (1.0 / norm_type)


def clip_gradients(
    parameters: Mapping[str, nn.Parameter], max_norm: float, total_norm: float
) -> None:
    """Scales all gradients as ``torch.nn.utils.clip_grad_norm_`` does."""
    factor = min(1.0, max_norm / (total_norm + 1e-6))
    if math.isnan(total_norm):
        factor = math.nan
    if factor == 1.0:
        return
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    with torch.no_grad():
        for gradient in gradients:
            gradient.mul_(factor)


def unscale(parameters: Mapping[str, nn.Parameter], scale: float) -> bool:
    """Divides all gradients by ``scale``; whether all are finite."""
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    values = [g._values() if g.is_sparse else g for g in gradients]
    if not values:
        return True
    with torch.no_grad():
        finite = [torch.isfinite(value).all() for value in values]
        for value in values:
            value.mul_(1.0 / scale)
        return bool(torch.stack(finite).all())


class LossScale:
    """Dynamic loss scaling for fp16, the rule of ``torch.amp.GradScaler``.

    The scale is doubled after ``growth_interval`` steps without overflow and halved by a step
    with one, which is skipped on every rank.

    Args:
        initial: First scale.
        growth: Factor after enough good steps.
        backoff: Factor after an overflow.
        growth_interval: Good steps before the scale grows.
    """

    def __init__(
        self,
        initial: float = 65536.0,
        growth: float = 2.0,
        backoff: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.scale = initial
        self._growth = growth
        self._backoff = backoff
        self._interval = growth_interval
        self._good_steps = 0

    def update(self, finite: bool) -> None:
        """Takes note of a step, the same on every rank."""
        if not finite:
            self.scale *= self._backoff
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self._interval:
            self.scale *= self._growth
            self._good_steps = 0

    def copy(self) -> LossScale:
        """One of its own for another rank."""
        twin = LossScale(self.scale, self._growth, self._backoff, self._interval)
        twin.load_state_dict(self.state_dict())
        return twin

    def state_dict(self) -> dict[str, float | int]:
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        self.scale = float(state["scale"])
        self._good_steps = int(state["good_steps"])
