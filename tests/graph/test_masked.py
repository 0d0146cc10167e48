"""Boolean indexing that ends in a sum or a mean, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpipe.errors import CaptureError
from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from tests.graph.eager import assert_equals_eager

MASK = torch.tensor([True, False, True, True])
LABELS = torch.tensor([0, -100, 2, 3])
VALUES = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
TOKENS = torch.tensor([[3, 0, 1], [0, 0, 0], [2, 2, 2], [1, 0, 3]])


def captured(
    loss: Callable[[Tensor, Any], Tensor], targets: Any, shape: tuple[int, ...] = (4, 4)
) -> ModelGraph:
    """The graph of a linear layer and this loss, equal to eager."""
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 4), torch.randn(shape)
    graph = capture(model, inputs, targets=targets, loss_fn=loss)
    assert_equals_eager(graph, model, (inputs,), {}, targets, loss)
    assert not any(op.coupled for op in graph.ops)
    return graph


MEANS: dict[str, tuple[Callable[[Tensor, Any], Tensor], Any]] = {
    "losses": (
        lambda o, t: F.cross_entropy(o, t[0], reduction="none")[t[1]].mean(),
        (LABELS.clamp(min=0), MASK),
    ),
    "elements": (lambda o, t: ((o - 1) ** 2)[t].mean(), VALUES > 0.5),
    "masked_select": (lambda o, t: torch.masked_select((o - 1) ** 2, t).mean(), VALUES > 0.5),
    "rows before the loss": (
        lambda o, t: F.mse_loss(o[t[1]], t[0][t[1]]),
        (VALUES, MASK),
    ),
    "classes before the loss": (
        lambda o, t: F.cross_entropy(o[t != -100], t[t != -100]),
        LABELS,
    ),
    "weights and smoothing": (
        lambda o, t: F.cross_entropy(
            o[t != -100],
            t[t != -100],
            weight=torch.tensor([1.0, 2.0, 3.0, 4.0]),
            label_smoothing=0.1,
        ),
        LABELS,
    ),
    "arithmetic in between": (
        lambda o, t: -(o[t[1]].log_softmax(-1) * t[0][t[1]].softmax(-1)).sum(-1).mean(),
        (VALUES, MASK),
    ),
    "binary": (
        lambda o, t: F.binary_cross_entropy(o.sigmoid()[t[1]], t[0][t[1]]),
        (VALUES, MASK),
    ),
    "binary with logits": (
        lambda o, t: F.binary_cross_entropy_with_logits(o[t[1]], t[0][t[1]]),
        (VALUES, MASK),
    ),
    "binary with logits, summed over a count": (
        lambda o, t: (
            F.binary_cross_entropy_with_logits(o[t[1]], t[0][t[1]], reduction="sum") / t[1].sum()
        ),
        (VALUES, MASK),
    ),
    "summed loss over a count": (
        lambda o, t: F.mse_loss(o[t[1]], t[0][t[1]], reduction="sum") / t[1].sum(),
        (VALUES, MASK),
    ),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_of_what_a_mask_picks_is_a_sum_over_a_count(name: str) -> None:
    loss, targets = MEANS[name]
    graph = captured(loss, targets)
    assert [term.reduction for term in graph.loss_terms] == ["sum_count"]


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: F.cross_entropy(o[t > 0], t[t > 0]),
        lambda o, t: (o[t > 0] ** 2).mean(),
        lambda o, t: F.cross_entropy(o[t > 0], t[t > 0], reduction="none").mean(),
    ],
)
def test_a_mask_may_pick_tokens(loss: Callable[[Tensor, Any], Tensor]) -> None:
    graph = captured(loss, TOKENS, (4, 3, 4))
    assert [term.reduction for term in graph.loss_terms] == ["sum_count"]


def test_sums_and_other_terms_stay_what_they_are() -> None:
    graph = captured(
        lambda o, t: (o[t] ** 2).mean() + 0.5 * (o**2).mean() + o[~t].abs().sum(), MASK
    )
    assert sorted(term.reduction for term in graph.loss_terms) == ["mean", "sum", "sum_count"]


def test_what_is_masked_out_may_be_infinite() -> None:
    values = torch.tensor([[1.0] * 4, [0.0] * 4, [2.0] * 4, [3.0] * 4])
    # The logarithm of the second row is -inf, and nobody picks it.
    captured(lambda o, t: (t[0][t[1]].log() * o[t[1]]).mean(), (values, MASK))


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: o[t].std(),
        lambda o, t: (o[t] @ o[t].T).mean(),
        lambda o, t: (o[t] - o[t].mean(0)).abs().mean(),
    ],
)
def test_anything_else_is_refused_with_its_place(loss: Callable[[Tensor, Any], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"depends on the data.*loss_fn.*torch\.where"):
        captured(loss, MASK)
