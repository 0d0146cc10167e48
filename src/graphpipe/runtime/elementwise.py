"""Optimizers for slices of parameters: they must treat every element alike.

AdamW updates each element from its own gradient alone, so the slices of a weight, on several
ranks, become what the whole would have become. Adafactor keeps a row and a column of
statistics, Muon orthogonalises the whole update, LAMB scales it by its norm: cut into slices,
the weight would be trained in another way. They are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from graphpipe.errors import RuntimeSetupError
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.runtime.optimize import OptimizerFactory

_ELEMENTWISE = {
    getattr(torch.optim, name)
    for name in (
        "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad",
        "Adadelta", "ASGD",
    )
}  # fmt: skip
"""Optimizers of torch whose update of an element depends on that element alone."""

_STEPS = 3
_LEAST_RATE = 1e-3
"""Updates at a smaller learning rate drown in the weights that they are compared in."""


def sliced_factory(factory: OptimizerFactory, graph: ModelGraph) -> OptimizerFactory:
    """A factory for ranks that may hold slices.

    The user's factory sees the model's own names: a rank with two slices of a weight has two
    pairs of that name.

    Args:
        factory: The user's.
        graph: Lists the slices.
    """
    wholes = {item.name: item.slice.of for item in graph.parameters if item.slice is not None}
    if not wholes:
        return factory

    def build(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        cut = {wholes[name]: parameter for name, parameter in named if name in wholes}
        optimizer = factory([(wholes.get(name, name), value) for name, value in named])
        if cut and isinstance(optimizer, torch.optim.Optimizer):
            _check_complete(optimizer, [(wholes[n], p) for n, p in named if n in wholes])
            check_elementwise(optimizer, min(cut))
        return optimizer

    return build


def check_elementwise(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Refuses an optimizer that would train a sliced weight in another way than the whole.

    Optimizers of torch are known. Of any other, one like it (of its class, with its defaults
    and the options of its groups) trains a small matrix whole and in two slices, and both must
    come to the same.

    Args:
        optimizer: The optimizer.
        name: The weight, for the message.

    Raises:
        RuntimeSetupError: with the reason.
    """
    kind = type(optimizer)
    if kind in _ELEMENTWISE:
        return
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        if options.get("lr") is not None and not options["lr"] > _LEAST_RATE:
            options["lr"] = 0.1  # a learning rate that warms up from (nearly) zero shows nothing
        try:
            same = _same_in_slices(lambda params, o=options: _like(optimizer, params, o))  # type: ignore[misc]
        except Exception as error:
            raise _refused(
                kind, name, f"one like it could not be tried: {type(error).__name__}: {error}"
            ) from error
        if not same:
            raise _refused(
                kind, name, "its update of a weight is not that of its slices put together"
            )


def _like(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], options: dict[str, Any]
) -> torch.optim.Optimizer:
    build: Callable[..., torch.optim.Optimizer] = type(optimizer)
    made = build([{"params": parameters, **options}], **_arguments(optimizer))
    return made


def _arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The defaults of an optimizer that its class takes as arguments."""
    import inspect

    known = inspect.signature(type(optimizer).__init__).parameters
    free = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in known.values())
    return {k: v for k, v in optimizer.defaults.items() if free or k in known}


def _same_in_slices(build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> bool:
    """Whether a matrix, whole and cut in two, comes to the same after a few steps."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    whole = nn.Parameter(start.clone())
    slices = [nn.Parameter(start[:, :3].clone()), nn.Parameter(start[:, 3:].clone())]
    for parameter in (whole, *slices):
        parameter.grad = torch.zeros_like(parameter)
    one, two = build([whole]), build(slices)
    for _ in range(_STEPS):
        # Columns of very different size: what looks at the whole gradient shows itself.
        gradient = torch.randn(6, 8, generator=generator, dtype=torch.float64)
        gradient *= torch.logspace(-2, 2, 8, dtype=torch.float64)
        whole.grad = gradient.clone()
        slices[0].grad, slices[1].grad = gradient[:, :3].clone(), gradient[:, 3:].clone()
        one.step()
        two.step()
    joined = torch.cat([item.detach() for item in slices], 1)
    moved = bool((joined != start).any())
    return moved and torch.allclose(joined, whole.detach(), rtol=1e-6, atol=1e-9)


def _refused(kind: type, name: str, reason: str) -> RuntimeSetupError:
    return RuntimeSetupError(
        f"{kind.__name__} cannot train a plan with split joins: {reason}",
        where=f"optimizer, {name} (its columns are on several ranks)",
        expected="an optimizer that updates each element from its own gradient, such as AdamW "
        "or SGD",
        got=kind.__name__,
        fix="Use such an optimizer, or plan without split_joins",
    )


def _check_complete(optimizer: torch.optim.Optimizer, cut: list[tuple[str, nn.Parameter]]) -> None:
    """Refuses an optimizer that has some slices of a weight and not the others.

    That is what comes of a dictionary by name in the factory.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    count: Mapping[str, int] = Counter(name for name, _ in cut)
    there: Mapping[str, int] = Counter(name for name, p in cut if id(p) in held)
    for name, number in count.items():
        if 0 < there.get(name, 0) < number:
            raise RuntimeSetupError(
                f"The optimizer has only {there[name]} of this rank's {number} slices of a weight",
                where=f"optimizer, {name}",
                expected="all pairs of one name, of which there are several where a join is split",
                fix="Keep the (name, parameter) pairs as a list in the factory, not as a dict",
            )
