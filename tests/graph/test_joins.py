"""What counts as a join, and who writes to what."""

from __future__ import annotations

import torch

from graphpipe.graph.joins import functional
from graphpipe.graph.split_joins import splittable
from tests.graph.joined import Joined, captured

aten = torch.ops.aten


def test_a_join_knows_its_parts() -> None:
    found = splittable(captured(Joined(lambda x, _: x.relu().tanh())))
    assert not found.refused
    (join,) = found.joins
    assert join.name == "join.weight"
    assert join.widths == (4, 3, 5)
    assert [str(node.target) for node in join.region] == [
        "aten.cat.default", "aten.relu.default", "aten.tanh.default",
    ]  # fmt: skip
    assert join.bias is not None
    assert join.bias.target == "join.bias"
    assert join.x is join.region[-1]


def test_ops_in_place_have_a_twin_that_is_not() -> None:
    assert functional(aten.relu_.default) is aten.relu.default
    assert functional(aten.mul_.Tensor) is aten.mul.Tensor
    assert functional(aten.relu.default) is aten.relu.default
    assert functional(aten.normal_.default) is None


def test_memory_that_others_see_is_not_changed_piece_by_piece() -> None:
    def seen(x: torch.Tensor, model: Joined) -> torch.Tensor:
        y = x.relu()
        z = y * 1.0
        y.add_(1.0)
        return z + y

    assert not splittable(captured(Joined(seen))).joins
    alone = splittable(captured(Joined(lambda x, _: x.relu().add_(1.0))))
    assert len(alone.joins) == 1
