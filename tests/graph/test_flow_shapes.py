"""Views, concatenation and creation: where the samples go."""

from __future__ import annotations

import pytest

from graphpipe.graph import flow_shapes as shapes
from graphpipe.graph.flow import FREE, MIXED, Flow, Kind, Number, Result, rows, total
from tests.graph.flow_calls import call, free, sizes, tensor

X = tensor(rows(0), "b", 3)
CUBE = tensor(rows(0), "b", 2, 3)
BATCH = Number((1, 0))


@pytest.mark.parametrize(
    ("result", "flow"),
    [
        (shapes.reshape(call("view", sizes("6b"), self=CUBE)), rows(0, 1, 6)),
        (shapes.reshape(call("view", sizes("2b", 3), self=CUBE)), rows(0, 1, 2)),
        (shapes.permute(call("permute", sizes(2, 3, "b"), self=CUBE, dims=[1, 2, 0])), rows(2)),
        (shapes.permute(call("transpose", sizes(3, "b"), self=X, dim0=0, dim1=-1)), rows(1)),
        (shapes.unsqueeze(call("unsqueeze", sizes(1, "b", 3), self=X, dim=0)), rows(1)),
        (shapes.unsqueeze(call("unsqueeze", sizes("b", 3, 1), self=X, dim=-1)), rows(0)),
        (shapes.expand(call("expand", sizes(2, "b", 3), self=X)), rows(1)),
        (shapes.repeat(call("repeat", sizes("2b", 3), self=X, repeats=[2, 1])), rows(0, 2)),
        (shapes.select(call("select", sizes("b", 3), self=CUBE, dim=1, index=0)), rows(0)),
        (shapes.pad(call("pad", sizes("b", 5), self=X, pad=[1, 1])), rows(0)),
        (shapes.cat(call("cat", sizes("2b", 3), tensors=[X, X], dim=0)), rows(0, 2)),
        (shapes.cat(call("cat", sizes("b", 6), tensors=[X, X], dim=1)), rows(0)),
        (shapes.stack(call("stack", sizes(2, "b", 3), tensors=[X, X])), rows(1)),
        (shapes.created(call("zeros", sizes("b", 3))), rows(0)),
        (shapes.created(call("full", (), fill_value=BATCH)), Flow(Kind.FREE, power=1)),
        (shapes.arange(call("arange", sizes("b"), end=BATCH)), Flow(Kind.PLACES)),
        (shapes.arange(call("arange", sizes(4), end=4)), FREE),
        (shapes.like(call("zeros_like", (), self=tensor(total()))), FREE),
    ],
)
def test_the_samples_move_and_stay_apart(result: Result, flow: Flow) -> None:
    assert (result.flows, result.coupled) == ((flow,), False)


@pytest.mark.parametrize(
    "result",
    [
        shapes.select(call("select", sizes(3), self=X, dim=0, index=0)),
        shapes.pad(call("pad", sizes((1, 2), 3), self=X, pad=[0, 0, 1, 1])),
        shapes.cat(call("cat", sizes((1, 2), 3), tensors=[X, free(2, 3)], dim=0)),
        shapes.cut(call("slice", sizes((1, -1), 3), self=X, dim=0, start=1)),
        shapes.reordered(call("flip", sizes("b", 3), self=X, dims=[0])),
        shapes.diagonal(call("diagonal", sizes(3), self=X)),
        shapes.matrix_wise(call("tril", sizes("b", 3), self=X)),
        shapes.one_hot(call("one_hot", sizes(4), self=tensor(total()))),
    ],
)
def test_what_takes_some_samples_apart_is_coupled(result: Result) -> None:
    assert result.coupled
    assert MIXED in result.flows


def test_batches_that_were_concatenated_are_split_again() -> None:
    two = tensor(rows(0, 2), "2b", 3)
    halves = shapes.cut(call("chunk", sizes("b", 3), sizes("b", 3), self=two, chunks=2))
    assert halves == Result((rows(0), rows(0)))
    second = call("slice", sizes("b", 3), self=two, dim=0, start=BATCH)
    assert shapes.cut(second) == Result((rows(0),))


def test_writing_a_constant_leaves_the_rows_and_writing_a_statistic_couples() -> None:
    assert shapes.written(call("copy_", sizes("b", 3), self=X, src=free(3))).flows == (rows(0),)
    told = shapes.written(call("copy_", (), self=free(), src=tensor(total(-1))))
    assert told == Result((total(-1),), coupled=True)
    mask = tensor(rows(0), "b", 3, dtype="bool")
    masked = call("masked_fill_", sizes("b", 3), self=X, mask=mask, value=0.0)
    assert shapes.written(masked) == Result((rows(0),))
