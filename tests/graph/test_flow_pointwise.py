"""Element-wise ops: where the samples stay, what scales with the batch, what mixes."""

from __future__ import annotations

import pytest

from graphpipe.graph.flow import FREE, MIXED, Flow, Kind, Number, rows, total
from graphpipe.graph.flow_pointwise import pointwise
from tests.graph.flow_calls import call, free, sizes, tensor

MATRIX = sizes("b", 3)
X = tensor(rows(0), "b", 3)
SUM, MEAN = tensor(total()), tensor(total(-1))
BATCH = Number((1, 0))


@pytest.mark.parametrize(
    ("made", "flow"),
    [
        (call("add", MATRIX, self=X, other=free(3)), rows(0)),
        (call("mul", sizes(2, "b", 3), self=X, other=free(2, 1, 1)), rows(1)),
        (call("clone", (), self=MEAN), total(-1)),
        (call("add", (), self=SUM, other=SUM), total()),
        (call("div", (), self=SUM, other=BATCH), total(-1)),
        (call("mul", (), self=MEAN, other=0.5), total(-1)),
        (call("add", (), self=MEAN, other=1.0), total(-1)),
        (call("div", MATRIX, self=X, other=BATCH), rows(0, power=-1)),
        (call("neg", (), self=SUM), total()),
        (call("exp", (), self=free()), FREE),
    ],
)
def test_linear_and_row_by_row_ops_mix_nothing(made: object, flow: Flow) -> None:
    result = pointwise(made)  # type: ignore[arg-type]
    assert (result.flows, result.coupled) == ((flow,), False)


@pytest.mark.parametrize(
    "made",
    [
        call("sqrt", (), self=SUM),
        call("mul", (), self=SUM, other=SUM),
        call("div", (), self=1.0, other=SUM),
        call("add", (), self=SUM, other=1.0),
        call("add", (), self=SUM, other=MEAN),
        call("div", (), self=SUM, other=BATCH, rounding_mode="floor"),
        call("add", (), self=MEAN, other=BATCH),
        call("add", MATRIX, self=X, other=tensor(rows(1), 3, "b")),
        call("exp", (), self=tensor(MIXED)),
        call("mul", MATRIX, self=SUM, other=X),
    ],
)
def test_what_is_no_sum_over_samples_is_coupled(made: object) -> None:
    assert pointwise(made).coupled  # type: ignore[arg-type]


def test_a_row_s_place_in_the_micro_batch_is_nobody_s_own_row() -> None:
    places = tensor(Flow(Kind.PLACES), "b")
    result = pointwise(call("add", sizes("b"), self=places, other=1))
    assert (result.flows, result.coupled) == ((MIXED,), False)
    assert pointwise(call("add", sizes("b"), self=places, other=tensor(rows(0), "b"))).coupled
