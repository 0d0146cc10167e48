"""Errors say what, where, expected, got and what to do, and survive a trip between processes."""

from __future__ import annotations

import pickle

import pytest

from graphpipe import errors
from graphpipe.errors import GraphPipeError, PlanError


def test_the_message_is_one_paragraph_in_a_fixed_order() -> None:
    error = PlanError(
        "The plan needs another world size",
        where="plan.json",
        expected=4,
        got=2,
        fix="Start 4 workers",
    )
    assert str(error) == (
        "The plan needs another world size (at plan.json). Expected 4, got 2. Start 4 workers."
    )


def test_parts_that_are_not_given_leave_no_trace() -> None:
    assert str(PlanError("The stage graph has a cycle")) == "The stage graph has a cycle."
    assert str(PlanError("Wrong dtype", got="int64")) == "Wrong dtype. Got int64."
    assert str(PlanError("Wrong dtype", expected="int64")) == "Wrong dtype. Expected int64."


def test_zero_and_false_are_values_worth_reporting() -> None:
    assert str(PlanError("Wrong count", expected=1, got=0)) == "Wrong count. Expected 1, got 0."
    assert "got False" in str(PlanError("Wrong flag", expected=True, got=False))


@pytest.mark.parametrize(
    "kind",
    [
        item
        for item in vars(errors).values()
        if isinstance(item, type) and issubclass(item, GraphPipeError)
    ],
)
def test_every_error_survives_pickling_with_its_parts(kind: type[GraphPipeError]) -> None:
    error = kind("What", where="here", expected=[1], got={"a": 2}, fix="Do that")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert (copy.what, copy.where, copy.expected, copy.got, copy.fix) == (
        "What",
        "here",
        [1],
        {"a": 2},
        "Do that",
    )
