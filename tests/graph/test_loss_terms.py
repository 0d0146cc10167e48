"""The loss taken apart: addends, reductions, counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from graphpipe.errors import CaptureError
from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from tests.graph.eager import assert_equals_eager

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 2, -100, 1, -100, 2])
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])


class Heads(nn.Module):
    """Two scalars of early layers, a scalar weight and class scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 3)
        self.log_weight = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.a(x))
        return self.b(h), h


def taken(loss_fn: Any, targets: Any = LABELS, **options: Any) -> ModelGraph:
    graph = capture(Heads(), (X,), targets=targets, loss_fn=loss_fn, **options)
    assert_equals_eager(graph, _model_of(graph), (X,), None, targets, loss_fn)
    return graph


def _model_of(graph: ModelGraph) -> nn.Module:
    """A model that holds the graph's own parameters."""
    model = Heads()
    assert graph.program is not None
    for name, value in graph.program.state.items():
        if isinstance(value, nn.Parameter):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, value)
    return model


def reductions(graph: ModelGraph) -> list[tuple[str, float]]:
    return [(term.reduction, term.sign) for term in graph.loss_terms]


def test_additions_are_peeled_and_scalings_go_to_each_addend() -> None:
    def loss(out: Any, y: torch.Tensor) -> torch.Tensor:
        scores, h = out
        aux = 0.0
        for part in (h, h * 2):
            aux = aux + part.pow(2).mean(dim=-1).mean()
        total = scores.logsumexp(-1).sum()
        total -= 0.1 * aux / 2
        return total + 3.0 * h.abs().sum() - 0.5 * (-h.mean())

    graph = taken(loss)
    assert reductions(graph) == [
        ("sum", 1.0),
        ("mean", -1.0),
        ("mean", -1.0),
        ("sum", 1.0),
        ("mean", 1.0),
    ]


def test_stacked_losses_are_addends() -> None:
    def loss(out: Any, y: torch.Tensor) -> torch.Tensor:
        scores, h = out
        return torch.stack([h.mean(), scores.mean(), h.pow(2).mean()]).mean()

    assert reductions(taken(loss)) == [("mean", 1.0)] * 3


def test_a_penalty_on_the_weights_is_batch_free() -> None:
    model = Heads()

    def loss(out: Any, y: torch.Tensor) -> torch.Tensor:
        return out[1].sum() + 1e-3 * model.a.weight.pow(2).sum()

    graph = capture(model, (X,), targets=LABELS, loss_fn=loss)
    assert reductions(graph) == [("sum", 1.0), ("batch_free", 1.0)]
    assert_equals_eager(graph, model, (X,), None, LABELS, loss)


def test_a_learned_weight_scales_every_addend() -> None:
    class Weighted(Heads):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            scores, h = super().forward(x)
            weight = torch.exp(-self.log_weight)
            return weight * (scores.pow(2).mean() + h.sum()) + self.log_weight

    model = Weighted()
    graph = capture(model, (X,))
    assert reductions(graph) == [("mean", 1.0), ("sum", 1.0), ("batch_free", 1.0)]
    assert_equals_eager(graph, model, (X,))


@pytest.mark.parametrize("weight", [None, torch.tensor([0.2, 1.0, 3.0])])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_mean_over_counted_targets_is_a_sum_and_a_count(
    weight: torch.Tensor | None, smoothing: float
) -> None:
    def loss(out: Any, y: torch.Tensor) -> torch.Tensor:
        return 2.0 * F.cross_entropy(out[0], y, weight=weight, label_smoothing=smoothing)

    graph = taken(loss)
    (term,) = graph.loss_terms
    assert term.reduction == "sum_count"
    assert term.count_op is not None
    assert term.count_from_inputs
    groups = {graph.op_by_name[name].group for name in (term.op, term.count_op)}
    assert len(groups) == 1
    assert None not in groups


def test_class_probabilities_and_summed_losses_count_nothing() -> None:
    soft = torch.softmax(torch.randn(6, 3), -1)
    assert reductions(taken(lambda out, y: F.cross_entropy(out[0], y), soft)) == [("mean", 1.0)]
    summed = taken(lambda out, y: F.cross_entropy(out[0], y, reduction="sum"))
    assert reductions(summed) == [("sum", 1.0)]


@pytest.mark.parametrize(
    ("divisor", "offset", "minimum"),
    [
        (lambda m: m.sum(), 0.0, None),
        (lambda m: m.sum() + 1e-6, 1e-6, None),
        (lambda m: m.sum().clamp(min=1.0), 0.0, 1.0),
    ],
)
def test_a_masked_mean_is_a_sum_and_a_count(divisor: Any, offset: float, minimum: Any) -> None:
    def loss(out: Any, mask: torch.Tensor) -> torch.Tensor:
        return (out[1].pow(2).mean(-1) * mask).sum() / divisor(mask)

    graph = taken(loss, MASK)
    (term,) = graph.loss_terms
    assert (term.reduction, term.count_offset, term.count_min) == ("sum_count", offset, minimum)


def test_a_count_of_the_models_own_values_says_so() -> None:
    def loss(out: Any, y: torch.Tensor) -> torch.Tensor:
        chosen = (out[1].detach() > 0).float()
        return (out[1] * chosen).sum() / chosen.sum()

    (term,) = taken(loss).loss_terms
    assert term.reduction == "sum_count"
    assert not term.count_from_inputs


def test_a_divisor_that_needs_a_gradient_is_coupled() -> None:
    (term,) = taken(lambda out, y: out[1].sum() / out[1].abs().sum()).loss_terms
    assert term.reduction == "coupled"


def test_a_pair_is_a_sum_and_a_count() -> None:
    def loss(out: Any, mask: torch.Tensor) -> Any:
        return (out[1].pow(2).sum(-1) * mask).sum(), mask.sum()

    graph = capture(Heads(), (X,), targets=MASK, loss_fn=loss)
    (term,) = graph.loss_terms
    assert term.reduction == "sum_count"
    assert term.count_from_inputs


def test_a_dict_is_a_sum_of_named_addends_with_declared_reductions() -> None:
    def loss(out: Any, y: torch.Tensor) -> Any:
        return {"main": out[0].mean(), "odd": out[1].std()}

    graph = capture(Heads(), (X,), targets=LABELS, loss_fn=loss, reduction={"odd": "mean"})
    assert reductions(graph) == [("mean", 1.0), ("mean", 1.0)]
    assert reductions(capture(Heads(), (X,), targets=LABELS, loss_fn=loss))[1][0] == "coupled"


def test_declared_reductions_are_checked() -> None:
    def loss(out: Any, y: torch.Tensor) -> torch.Tensor:
        return out[0].sum()

    with pytest.raises(CaptureError, match="contradicts"):
        capture(Heads(), (X,), targets=LABELS, loss_fn=loss, reduction="mean")
    with pytest.raises(CaptureError, match="'average'"):
        capture(Heads(), (X,), targets=LABELS, loss_fn=loss, reduction="average")


def test_a_loss_per_sample_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"\(b, 5\).*\.mean\(\)"):
        capture(Heads(), (X,), targets=LABELS, loss_fn=lambda out, y: out[1])
