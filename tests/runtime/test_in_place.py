"""In-place writes and state that a forward changes, cut anywhere, equal a single process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphpipe.graph.capture import capture
from tests.runtime.equality import assert_same, pipeline_run, sgd, single_process
from tests.runtime.manual import Part, manual_plan
from tests.runtime.models import Example


class Net(nn.Module):
    def __init__(self, middle: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.stem, self.inner, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("steps", torch.zeros(()))
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(self, self.stem(x))


def filled(net: Net, h: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(h.shape[0], 3)
    out[:, 0] = h[:, 0]
    out[:, 1:] = net.head(net.inner(h))[:, 1:]
    return out


def clamped(net: Net, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        net.inner.weight.clamp_(-0.2, 0.2)
    return net.head(net.inner(h))


def scaled(net: Net, h: torch.Tensor) -> torch.Tensor:
    return net.head(net.inner(h)) * h.shape[0]


def example(middle: Callable[[Net, torch.Tensor], torch.Tensor]) -> Example:
    torch.manual_seed(0)
    return Example(Net(middle), (torch.randn(12, 4),), torch.randn(12, 3), functional.mse_loss)


@pytest.mark.filterwarnings("ignore::graphpipe.graph.capture.CoupledBatchWarning")
@pytest.mark.parametrize("middle", [filled, clamped])
@pytest.mark.parametrize("size", [3, 12])
def test_a_write_in_place_keeps_the_gradients(
    middle: Callable[[Net, torch.Tensor], torch.Tensor], size: int
) -> None:
    made = example(middle)
    graph = capture(made.model, made.args, targets=made.targets, loss_fn=made.loss_fn)
    parts = [Part("stem", size), Part("inner", 6), Part("head loss_fn", size)]
    plan = manual_plan(graph, parts, batch_size=12)
    assert all(stage.has_backward for stage in plan.stages)
    got = pipeline_run(made, graph, plan, sgd, 3, transport="in_process")
    assert_same(got, single_process(made, sgd, 3), 1e-6)


def test_a_value_that_is_scaled_by_the_samples_stays_in_its_stage() -> None:
    made = example(scaled)
    graph = capture(
        made.model, made.args, targets=made.targets, loss_fn=lambda y, t: (y * t).mean()
    )
    scaling = next(op for op in graph.ops if op.target == "aten.mul.Tensor")
    assert not scaling.crossable


def counted(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.steps.add_(1.0)
    return net.head(h) / net.steps


@pytest.mark.filterwarnings("ignore::graphpipe.graph.capture.CoupledBatchWarning")
def test_what_reads_a_buffer_that_the_forward_changes_is_coupled() -> None:
    made = example(counted)
    graph = capture(made.model, made.args, targets=made.targets, loss_fn=made.loss_fn)
    assert [op.target for op in graph.ops if op.coupled] == ["aten.div.Tensor"]


class Bags(nn.Module):
    def __init__(self, by_frequency: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 3, scale_grad_by_freq=by_frequency)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words(x)


@pytest.mark.filterwarnings("ignore::graphpipe.graph.capture.CoupledBatchWarning")
@pytest.mark.parametrize("by_frequency", [False, True])
def test_a_gradient_by_frequency_is_coupled(by_frequency: bool) -> None:
    x, y = torch.randint(0, 9, (4,)), torch.randn(4, 3)
    graph = capture(Bags(by_frequency), (x,), targets=y, loss_fn=functional.mse_loss)
    assert any(op.coupled for op in graph.ops) is by_frequency
