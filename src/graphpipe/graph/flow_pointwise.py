"""Data flow through element-wise ops, with broadcasting."""

from __future__ import annotations

from dataclasses import replace

from graphpipe.graph.flow import (
    FREE,
    MIXED,
    Call,
    Flow,
    Kind,
    Number,
    Result,
    Value,
    mixed,
    rows,
    same,
    total,
)

COPIES = {
    "clone", "contiguous", "to", "type_as", "detach", "detach_", "alias", "lift_fresh", "_to_copy",
    "positive", "view_as_real", "float", "double", "half", "bfloat16", "requires_grad_",
}  # fmt: skip
"""Ops that change nothing that matters here (dtype, layout, the autograd graph)."""

_SCALINGS = {"mul", "mul_", "multiply", "div", "div_", "divide", "true_divide", "neg", "neg_"}
_SUMS = {"add", "add_", "sub", "sub_", "subtract", "rsub"}
_DIVISIONS = {"div", "div_", "divide", "true_divide"}


def pointwise(call: Call) -> Result:
    """Every element of the output depends on the elements in its place alone."""
    values = list(call.values())
    if any(value.flow.kind is Kind.MIXED for value in values):
        return mixed(call)
    if call.name in COPIES and values:
        return same(values[0].flow, call)
    where = _place(call, values)
    batched = [value.flow for value in values if value.flow.batched]
    if batched and where is None:
        return mixed(call)
    sums = [value.flow for value in values if value.flow.kind is Kind.SUM]
    power = _power(call, values)
    if batched:
        assert where is not None
        places = [flow for flow in batched if flow.kind is Kind.PLACES]
        if len(places) == len(batched):
            return same(MIXED, call)
        coupled = bool(sums or places) or power is None
        # What mixes samples gives each of them a row of its own again.
        return same(where if coupled else replace(where, power=power or 0), call, coupled=coupled)
    if sums:
        return same(total(power), call) if power is not None else mixed(call)
    if power is None:
        return mixed(call)
    return same(replace(FREE, power=power), call)


def _place(call: Call, values: list[Value]) -> Flow | None:
    """Where the samples are in the output; None where the arguments disagree."""
    found: set[tuple[int, int, int]] = set()
    for value in values:
        if value.flow.batched:
            dim = value.flow.dim + call.ndim - value.ndim
            found.add((dim, *value.flow.layout))
    if len(found) != 1:
        return None
    dim, outer, inner = found.pop()
    return rows(dim, outer, inner)


def _power(call: Call, values: list[Value]) -> int | None:
    """The power of b in the output; None where the op is not linear in what depends on b.

    Sums over samples may be added to one another and scaled; a mean may have a constant
    added to it, for the mean of a constant is that constant.
    """
    numbers = list(call.numbers())
    powers = [value.flow.power for value in values]
    sums = sum(value.flow.kind is Kind.SUM for value in values)
    if not sums and not numbers and not any(powers):
        return 0
    if call.name in _SUMS:
        if numbers:
            return None
        wanted = {
            value.flow.power for value in values if value.flow.kind is Kind.SUM or value.flow.power
        }
        others = any(value.flow.kind is not Kind.SUM and not value.flow.power for value in values)
        scalars = not all(isinstance(call.get(name), Value) for name in ("self", "other"))
        if len(wanted) != 1:
            return None
        power = wanted.pop()
        if (others or scalars) and not (sums and power == -1):
            return None
        return power
    if call.name in _SCALINGS:
        first, second = call.get("self"), call.get("other")
        left, right = _degree(first), _degree(second)
        if left is None or right is None or sums > 1:
            return None
        if call.name in _DIVISIONS:
            if isinstance(second, Value) and second.flow.kind is Kind.SUM:
                return None
            if call.get("rounding_mode") is not None:
                return None
            return left - right
        return left + right
    return None


def _degree(argument: object) -> int | None:
    """The power of b in one factor."""
    if isinstance(argument, Value):
        return argument.flow.power
    if isinstance(argument, Number):
        size = argument.size
        return 1 if size is not None and size[1] == 0 else None
    return 0
