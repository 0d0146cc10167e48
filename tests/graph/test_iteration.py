"""Loops over the samples of a batch."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from graphpipe.graph.iteration import is_concatenation, refused, samples_as_one
from graphpipe.graph.watch import ModuleStack

cat = torch.ops.aten.cat.default


def test_only_a_concatenation_of_the_stand_in_alone_is_understood() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    fits = [graph.call_function(cat, ([x],)), graph.call_function(cat, ([x], 0))]
    others = [
        graph.call_function(cat, ([x], 1)),
        graph.call_function(cat, ([x, x],)),
        graph.call_function(torch.ops.aten.stack.default, ([x],)),
    ]
    output = graph.output(x)
    assert all(is_concatenation(user, x) for user in (*fits, output))
    assert not any(is_concatenation(user, x) for user in others)


def test_a_tensor_of_a_known_size_is_iterated_as_ever() -> None:
    before = torch.Tensor.__iter__
    with ModuleStack(nn.Identity()) as stack, samples_as_one(stack):
        assert torch.Tensor.__iter__ is not before
        assert [row.tolist() for row in torch.eye(2)] == [[1, 0], [0, 1]]
    assert torch.Tensor.__iter__ is before


@pytest.mark.parametrize(("module", "remedy"), [("tower", True), (None, False)])
def test_a_refusal_names_the_place_and_the_remedy(module: str | None, remedy: bool) -> None:
    text = str(refused(module, "net.py:7"))
    assert "net.py:7" in text
    assert ("module 'tower'" in text, "opaque=['tower']" in text) == (remedy, remedy)
