"""Modules that stay one op."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphpipe.errors import CaptureError
from graphpipe.graph.opaque import OpaqueCalls


def test_paths_and_classes_must_occur_in_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    for option in (["1"], [""]):
        with pytest.raises(CaptureError, match="does not exist"):
            OpaqueCalls(model, option)
    with pytest.raises(CaptureError, match=r"no instance.*Conv2d"):
        OpaqueCalls(model, [nn.Conv2d])


def test_a_given_function_says_the_shapes_and_the_module_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    calls = OpaqueCalls(model, {"0": lambda x, scale: (x.new_empty(2 * x.shape[0], 5), x)})
    with calls.installed(model), pytest.raises(AssertionError, match="not replaced"):
        model[0](torch.ones(3, 2), scale=4)
    assert "forward" not in vars(model[0])
    (site,) = calls.sites
    assert (site.path, site.leaves) == ("0", (0, (4,)))
    assert [dims for dims, _ in site.outputs] == [((0, 6), (0, 5)), ((0, 3), (0, 2))]


def test_a_copy_is_run_where_no_function_is_given() -> None:
    model = nn.Sequential(nn.Linear(2, 7))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calls = OpaqueCalls(model, [nn.Linear])
    with calls.installed(model), pytest.raises(AssertionError, match="not replaced"):
        model[0](torch.ones(3, 2))
    assert calls.sites[0].outputs == ((((0, 3), (0, 7)), torch.float32),)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (lambda x: 3, "tensors only"),
        (lambda x: x.missing, "function for an opaque module fails"),
    ],
)
def test_what_a_function_may_not_return_is_refused(shapes: object, text: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    calls = OpaqueCalls(model, {"0": shapes})  # type: ignore[dict-item]
    with calls.installed(model), pytest.raises(CaptureError, match=text):
        model[0](torch.ones(3, 2))
