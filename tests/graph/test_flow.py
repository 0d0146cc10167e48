"""The vocabulary of the data-flow analysis."""

from __future__ import annotations

from graphpipe.graph.flow import (
    FREE,
    MIXED,
    Call,
    Flow,
    Kind,
    Number,
    Value,
    depends,
    leaves_of,
    mixed,
    product,
    rows,
    same,
    total,
)


def test_a_size_depends_on_the_batch_unless_it_is_known_not_to() -> None:
    assert [depends(size) for size in ((0, 3), (2, 0), (1, 1), None)] == [False, True, True, True]


def test_a_product_is_known_only_for_constant_sizes() -> None:
    assert product([]) == 1
    assert product([(0, 2), (0, 5)]) == 10
    assert product([(0, 2), (1, 0)]) is None
    assert product([(0, 2), None]) is None


def test_only_rows_and_places_have_a_dimension_of_samples() -> None:
    flows = (FREE, rows(1), Flow(Kind.PLACES), total(), MIXED)
    assert [flow.batched for flow in flows] == [False, True, True, False, False]
    moved = rows(0, 2, 3, -1).at(2)
    assert (moved.dim, moved.layout, moved.power) == (2, (2, 3), -1)


def test_a_call_finds_its_tensors_and_numbers_in_lists_too() -> None:
    first, second = Value(rows(0), ((1, 0), (0, 3))), Value(FREE, ((0, 3),))
    arguments = {"tensors": [first, second], "n": Number((1, 0)), "dim": -1, "none": None}
    call = Call("op", arguments, (((1, 0), (0, 3)),), leaves=leaves_of(arguments))
    assert list(call.values()) == [first, second]
    assert list(call.numbers()) == [Number((1, 0))]
    assert (call.first, call.ndim, call.get("none", 7)) == (first, 2, 7)


def test_dimensions_are_counted_from_the_front() -> None:
    call = Call("op", {"one": -1, "many": [0, -1], "empty": [], "none": None}, ((),))
    assert [call.dims_of(name, 3) for name in ("one", "many", "empty", "none", "absent")] == [
        [2],
        [0, 2],
        [0, 1, 2],
        [0, 1, 2],
        [0, 1, 2],
    ]


def test_every_output_has_a_flow() -> None:
    call = Call("op", {}, ((), ()))
    assert same(total(), call).flows == (total(), total())
    assert mixed(call) == same(MIXED, call, coupled=True)
