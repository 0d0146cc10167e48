"""Names and loss addends of a trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphpipe.errors import CaptureError
from graphpipe.graph.capture import capture
from graphpipe.graph.tracing import names_of
from tests.graph.small import Small


def test_ties_have_one_canonical_name_and_a_loss_has_a_prefix() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    assert names_of(model, nn.BatchNorm1d(1, affine=False)) == {
        "model.a.weight": "a.weight",
        "model.b.weight": "a.weight",
        "loss_fn.running_mean": "loss_fn.running_mean",
        "loss_fn.running_var": "loss_fn.running_var",
        "loss_fn.num_batches_tracked": "loss_fn.num_batches_tracked",
    }


@pytest.mark.parametrize(
    ("loss", "got"), [(lambda out: out["h"], r"shape \(b, 4\)"), (lambda out: 1.0, "float")]
)
def test_what_is_no_loss_is_refused_and_the_model_is_left_as_it_was(loss: object, got: str) -> None:
    model = Small().eval()
    before = dict(model.named_parameters())
    with pytest.raises(CaptureError, match=f"does not return a loss.*{got}"):
        capture(model, (torch.zeros(4, 3),), loss_fn=loss)  # type: ignore[arg-type]
    assert not any(module.training for module in model.modules())
    assert all(value is before[name] for name, value in model.named_parameters())
