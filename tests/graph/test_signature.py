"""Which inputs are per-sample, and what a later call must look like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphpipe.errors import CaptureError, InputError
from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import TensorSpec
from graphpipe.graph.signature import (
    Signature,
    accepts_targets,
    bind_inputs,
    check_tensor,
    read_signature,
)


class Flags(nn.Module):
    """Takes what people pass: tensors, None, flags, numbers, a tensor of no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        alpha: float = 1.0,
        *,
        mode: str = "tanh",
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        h = self.linear(x) * alpha
        h = torch.tanh(h) if mode == "tanh" else torch.relu(h)
        if mask is not None:
            h = h * mask
        return h if weight is None else h + weight


X = torch.zeros(6, 3)
WEIGHT = torch.zeros(4)


def read(
    *args: Any, targets: Any = None, options: dict[str, Any] | None = None, **kwargs: Any
) -> Signature:
    return read_signature(Flags(), args, kwargs, targets, **(options or {}))


def test_leaves_have_paths_names_and_rows() -> None:
    signature = read(X, None, 0.5, mode="relu", targets={"label": torch.zeros(6)})
    assert [(leaf.path, leaf.name, leaf.rows) for leaf in signature.leaves] == [
        ("args[0]", "x", 1),
        ("args[1]", "mask", 0),
        ("args[2]", "alpha", 0),
        ("kwargs['mode']", "mode", 0),
        ("targets['label']", "targets_label", 1),
    ]
    assert signature.batch == 6
    assert signature.constants == {"args[1]": None, "args[2]": 0.5, "kwargs['mode']": "relu"}


def test_a_tensor_of_no_sample_must_be_marked() -> None:
    with pytest.raises(CaptureError) as error:
        read(X, weight=WEIGHT)
    text = str(error.value)
    assert "kwargs['weight']" in text
    assert "(4,)" in text
    assert "not_per_sample" in text


@pytest.mark.parametrize("mark", ["weight", "kwargs['weight']", "kwargs"])
def test_a_mark_is_a_name_a_path_or_a_container(mark: str) -> None:
    signature = read(X, weight=WEIGHT, options={"not_per_sample": [mark]})
    assert [leaf.rows for leaf in signature.tensors] == [1, 0]


def test_a_mark_that_fits_nothing_is_refused() -> None:
    with pytest.raises(CaptureError, match="'wieght'"):
        read(X, weight=WEIGHT, options={"not_per_sample": ["wieght"]})


def test_several_rows_a_sample_are_declared() -> None:
    signature = read(X, torch.zeros(48, 4), options={"rows_per_sample": {"mask": 8}})
    assert [leaf.rows for leaf in signature.tensors] == [1, 8]
    assert signature.batch == 6


def test_scalars_belong_to_no_sample() -> None:
    assert read(X, torch.tensor(2.0)).tensors[1].rows == 0


def test_one_sample_is_too_few_and_none_is_nothing() -> None:
    with pytest.raises(CaptureError, match="at least 2 samples"):
        read(torch.zeros(1, 3))
    with pytest.raises(CaptureError, match="No input has a batch dimension"):
        read(torch.tensor(1.0))


def test_positional_names_cover_varargs() -> None:
    class Many(nn.Module):
        def forward(self, first: torch.Tensor, *xs: torch.Tensor) -> torch.Tensor:
            return first

    signature = read_signature(Many(), (X, X, X), {}, None)
    assert [leaf.name for leaf in signature.leaves[:3]] == ["first", "xs_0", "xs_1"]


def test_targets_are_passed_where_they_are_taken() -> None:
    assert accepts_targets(lambda out, target: out)
    assert accepts_targets(nn.functional.cross_entropy)
    assert not accepts_targets(lambda out: out)


@pytest.fixture(scope="module")
def captured() -> Any:
    return capture(
        Flags(),
        (X, None, 0.5),
        {"mode": "relu", "weight": WEIGHT},
        targets=torch.zeros(6, 4),
        loss_fn=nn.functional.mse_loss,
        not_per_sample=["weight"],
    )


def bind(graph: Any, *args: Any, targets: Any = None, **kwargs: Any) -> Any:
    return bind_inputs(graph, graph.program, args, kwargs, targets)


def test_binding_gives_tensors_by_name_and_the_batch(captured: Any) -> None:
    x, y = torch.ones(3, 3), torch.ones(3, 4)
    tensors, batch = bind(captured, x, None, 0.5, weight=WEIGHT, mode="relu", targets=y)
    assert batch == 3
    assert tensors["x"] is x
    assert tensors["weight"] is WEIGHT
    assert tensors["targets"] is y


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X, None, 0.7), {}, "args\\[2\\].*0.5.*0.7"),
        ((X, None, 0.5), {"mode": "tanh"}, "kwargs\\['mode'\\]"),
        ((X, X, 0.5), {}, "args\\[1\\].*None"),
        ((X.double(), None, 0.5), {}, "dtype.*args\\[0\\].*float32.*float64"),
        ((X[:, :2], None, 0.5), {}, "shape.*args\\[0\\].*\\(6, 3\\).*\\(6, 2\\)"),
        ((X[:4], None, 0.5), {}, "number of samples"),
        ((X, None), {}, "structure"),
        ((X[:0], None, 0.5), {"targets": torch.zeros(0, 4)}, "empty"),
    ],
)
def test_a_call_that_differs_is_refused_by_name(
    captured: Any, args: Any, kwargs: Any, message: str
) -> None:
    given = {"mode": "relu", "weight": WEIGHT, "targets": torch.zeros(6, 4), **kwargs}
    with pytest.raises(InputError, match=message):
        bind(captured, *args, **given)


def test_a_missing_keyword_is_named(captured: Any) -> None:
    with pytest.raises(InputError, match="'weight'"):
        bind(captured, X, None, 0.5, mode="relu", targets=torch.zeros(6, 4))


def test_a_tensor_in_the_place_of_none_is_refused(captured: Any) -> None:
    with pytest.raises(InputError, match="is not a tensor"):
        bind(captured, None, None, 0.5, mode="relu", weight=WEIGHT, targets=torch.zeros(6, 4))


def test_check_tensor_knows_rows_per_sample() -> None:
    spec = TensorSpec(shape=("8*b", 3), dtype="float32")
    check_tensor("images", spec, torch.zeros(16, 3), 2)
    with pytest.raises(InputError, match="images"):
        check_tensor("images", spec, torch.zeros(17, 3), 2)
