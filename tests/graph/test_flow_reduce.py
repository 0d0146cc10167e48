"""Reductions, scans and losses: only sums and means over the samples are linear."""

from __future__ import annotations

import pytest

from graphpipe.graph.flow import FREE, MIXED, Flow, Kind, rows, total
from graphpipe.graph.flow_reduce import along, distance, loss, reduce
from tests.graph.flow_calls import call, free, sizes, tensor

X = tensor(rows(0), "b", 3)
MIDDLE = tensor(rows(1), 2, "b", 3)


@pytest.mark.parametrize(
    ("name", "value", "dim", "keepdim", "flow"),
    [
        ("sum", X, None, False, total()),
        ("mean", X, [0], False, total(-1)),
        ("amax", X, [1], False, rows(0)),
        ("sum", MIDDLE, [0], False, rows(0)),
        ("sum", MIDDLE, [0], True, rows(1)),
        ("var", MIDDLE, [-1], False, rows(1)),
        ("max", free(3), None, False, FREE),
    ],
)
def test_reductions(name: str, value: object, dim: object, keepdim: bool, flow: Flow) -> None:
    result = reduce(call(name, (), self=value, dim=dim, keepdim=keepdim))
    assert (result.flows, result.coupled) == ((flow,), False)


@pytest.mark.parametrize("name", ["amax", "var", "prod", "argmax", "std"])
def test_other_reductions_over_the_samples_are_coupled(name: str) -> None:
    assert reduce(call(name, (), self=X, dim=[0])).flows == (MIXED,)
    assert reduce(call(name, (), self=X)).coupled


def test_a_scan_along_the_samples_is_coupled_and_along_others_not() -> None:
    assert along(call("softmax", sizes("b", 3), self=X, dim=-1)).flows == (rows(0),)
    assert along(call("cumsum", sizes("b", 3), self=X, dim=0)).coupled
    assert along(call("sort", sizes("b", 3), sizes("b", 3), self=X, dim=-2)).flows == (MIXED,) * 2


@pytest.mark.parametrize(("reduction", "flow"), [(0, rows(0)), (1, total(-1)), (2, total())])
def test_a_loss_follows_its_reduction(reduction: int, flow: Flow) -> None:
    made = call("mse_loss", (), self=X, target=X, reduction=reduction)
    assert (loss(made).flows, loss(made).coupled) == ((flow,), False)


def test_a_loss_of_rows_that_do_not_belong_together_is_coupled() -> None:
    labels = tensor(rows(0, 1, 2), "2b")
    assert loss(call("nll_loss", (), self=X, target=labels)).coupled
    places = tensor(Flow(Kind.PLACES), "b")
    assert loss(call("cross_entropy_loss", (), self=X, target=places)).coupled


def test_a_distance_over_features_keeps_rows() -> None:
    assert distance(call("cosine_similarity", sizes("b"), x1=X, x2=X, dim=1)).flows == (rows(0),)
    assert distance(call("cosine_similarity", sizes(3), x1=X, x2=X, dim=0)).coupled
    assert distance(call("pairwise_distance", sizes("b"), x1=X, x2=free(3))).flows == (rows(0),)
