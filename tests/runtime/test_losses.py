"""Loss terms of every kind add up to the loss of the whole mini-batch, with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphpipe.errors import CaptureError
from graphpipe.graph.capture import CoupledBatchWarning, capture
from graphpipe.runtime.pipeline import Pipeline
from tests.runtime.equality import assert_same, pipeline_run, sgd, single_process
from tests.runtime.manual import Part, manual_plan
from tests.runtime.models import Example

BATCH = 10
WEIGHT = torch.tensor([0.1, 2.0, 0.7])


class Heads(nn.Module):
    """A head, and parameters that weigh and penalise the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.scales = nn.Parameter(torch.tensor([0.1, 0.2]))
        self.offset = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.head(self.stem(x).tanh()), self.scales, self.offset


def _labels() -> torch.Tensor:
    labels = torch.randint(0, 3, (BATCH,))
    labels[1] = labels[6] = -100
    return labels


def _uncertainty(output: Any, target: torch.Tensor) -> torch.Tensor:
    prediction, scales, offset = output
    first = torch.exp(-scales[0]) * functional.mse_loss(prediction, target)
    second = torch.exp(-scales[1]) * functional.l1_loss(prediction, target)
    return first + second + scales.sum() + offset


LOSSES: dict[str, tuple[Callable[[Any, Any], torch.Tensor], bool]] = {
    "smoothed, weighted classes": (
        lambda out, labels: functional.cross_entropy(
            out[0], labels, weight=WEIGHT, label_smoothing=0.1
        ),
        True,
    ),
    "parameters as terms": (_uncertainty, False),
    "sum less mean": (
        lambda out, y: 0.1 * (out[0] - y).pow(2).sum() - (out[0] - y).abs().mean(),
        False,
    ),
    "ratio": (lambda out, y: (out[0].pow(2) * (y > 0)).sum() / (y > 0).sum().clamp(min=1), False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_terms_add_up(name: str) -> None:
    torch.manual_seed(0)
    loss_fn, classes = LOSSES[name]
    targets = _labels() if classes else torch.randn(BATCH, 3)
    made = Example(Heads(), (torch.randn(BATCH, 4),), targets, loss_fn)
    graph = capture(made.model, made.args, targets=targets, loss_fn=loss_fn)
    parts = [Part("stem", 4, replicas=2), Part("head", 2, replicas=3)]
    plan = manual_plan(graph, parts, batch_size=BATCH)
    got = pipeline_run(made, graph, plan, sgd, 2, transport="in_process")
    assert_same(got, single_process(made, sgd, 2), 2e-6)


def test_a_loss_that_is_no_sum_over_micro_batches_is_warned_of_and_right_when_whole() -> None:
    torch.manual_seed(0)
    made = Example(
        Heads(),
        (torch.randn(BATCH, 4),),
        torch.randn(BATCH, 3),
        lambda out, y: functional.mse_loss(out[0], y) / out[0].shape[0],
    )
    with pytest.warns(CoupledBatchWarning, match="div"):
        graph = capture(made.model, made.args, targets=made.targets, loss_fn=made.loss_fn)
    notes = manual_plan(graph, [Part("stem", 2), Part("head", 2)], batch_size=BATCH).notes
    assert any("mix the samples" in note for note in notes)
    plan = manual_plan(graph, [Part("stem", 2), Part("head", BATCH)], batch_size=BATCH)
    assert not plan.notes
    got = pipeline_run(made, graph, plan, sgd, 2, transport="in_process")
    assert_same(got, single_process(made, sgd, 2), 2e-6)


def test_a_mean_may_not_be_declared_a_quotient() -> None:
    args, targets = (torch.randn(4, 4),), torch.randn(4, 3)
    with pytest.raises(CaptureError, match="sum over a count"):
        capture(
            Heads(), args, targets=targets, reduction="sum_count",
            loss_fn=lambda out, y: functional.mse_loss(out[0], y),
        )  # fmt: skip


class Twice(nn.Module):
    """One normalisation, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.second, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.second(self.norm(self.first(x)))))


def test_a_normalisation_may_be_called_twice() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.randn(6, 3)
    model = Twice()
    graph = capture(model, (x,), targets=y, loss_fn=functional.mse_loss)
    plan = manual_plan(graph, [Part("first norm second", 6), Part("head", 6)], batch_size=6)
    pipe = Pipeline(model, plan, functional.mse_loss, sgd, graph=graph, transport="in_process")
    pipe.step((x,), targets=y)
    functional.mse_loss(model(x), y).backward()
    state = pipe.state_dict()
    for name, value in model.named_buffers():
        torch.testing.assert_close(state[name], value)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)
