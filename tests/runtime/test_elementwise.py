"""Which optimizers may train slices of a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from graphpipe.errors import RuntimeSetupError
from graphpipe.graph.split_joins import split_joins
from graphpipe.runtime.elementwise import check_elementwise, sliced_factory
from tests.graph.joined import Joined, captured


class Signed(torch.optim.Optimizer):
    """Sign descent, an optimizer that nobody knows; element by element."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad.sign())


class Scaled(Signed):
    """The same by the norm of the whole gradient, as LAMB and LARS do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad / parameter.grad.norm())


class Lazy(Signed):
    """A wrapper that cannot be built from its defaults."""

    def __init__(self, params: Iterable[Any], lr: float, needed: object) -> None:
        super().__init__(params, lr)


def weight() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(4, 4))]


@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, 0.1),
        lambda p: torch.optim.Adagrad(p, 0.1),
        lambda p: Signed(p),
        lambda p: Signed(p, lr=0.0),
        lambda p: type("MyAdamW", (torch.optim.AdamW,), {})(p, lr=0.1),
    ],
)
def test_element_wise_optimizers_are_accepted(build: Callable[..., Any]) -> None:
    check_elementwise(build(weight()), "join.weight")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda p: torch.optim.Adafactor(p, 0.1), "Adafactor cannot train.*not that of its slices"),
        (lambda p: torch.optim.Muon(p, 0.1), "Muon cannot train.*not that of its slices"),
        (lambda p: Scaled(p), "Scaled cannot train"),
        (lambda p: Scaled(p, lr=1e-8), "Scaled cannot train"),
        (lambda p: Lazy(p, 0.1, object()), "Lazy cannot train.*could not be tried"),
    ],
)
def test_others_are_refused_with_the_reason(build: Callable[..., Any], reason: str) -> None:
    with pytest.raises(RuntimeSetupError, match=reason):
        check_elementwise(build(weight()), "join.weight")


def test_every_known_optimizer_behaves_as_it_is_said_to() -> None:
    from graphpipe.runtime import elementwise

    for kind in elementwise._ELEMENTWISE:
        options = {"lr": 0.01}
        assert elementwise._same_in_slices(lambda p, k=kind, o=options: k(p, **o)), kind


def test_the_factory_sees_the_models_own_names() -> None:
    graph = split_joins(captured(Joined()))
    seen: list[str] = []

    def factory(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        seen.extend(name for name, _ in named)
        return torch.optim.SGD([p for _, p in named], 0.1)

    build = sliced_factory(factory, graph)
    named = [(name, nn.Parameter(torch.zeros(2))) for name in (
        "head.bias", "join.weight[:, 0:4]", "join.weight[:, 4:7]",
    )]  # fmt: skip
    build(named)
    assert seen == ["head.bias", "join.weight", "join.weight"]

    with pytest.raises(RuntimeSetupError, match="only 1 of this rank's 2 slices"):
        sliced_factory(lambda pairs: torch.optim.SGD(dict(pairs).values(), 0.1), graph)(named)
    # Leaving a weight out on purpose is the user's right.
    sliced_factory(lambda pairs: torch.optim.SGD([pairs[0][1]], 0.1), graph)(named)
    assert sliced_factory(factory, captured(Joined())) is factory
