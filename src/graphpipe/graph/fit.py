"""Integer functions of the batch from their values at a few batch sizes."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import lcm

from graphpipe.graph.expression import Expression, evaluate

SAMPLE_SIZES = (2, 3, 5, 7)
"""Batch sizes at which a graph is observed: three fix a polynomial of degree two, the fourth
verifies it."""


def fitted(values: Mapping[int, int]) -> tuple[Expression, bool]:
    """The expression in ``b`` through ``values`` and whether it is exact at all of them.

    Sizes, bytes and FLOPs of tensors are polynomials of the batch of degree two at most (an
    in-batch similarity is b * b). Where they are not, the line through the two largest sizes
    stands in, never below zero.
    """
    sizes = sorted(values)
    for degree in (0, 1, 2):
        if degree >= len(sizes):
            break
        coefficients = _interpolated([(b, values[b]) for b in sizes[: degree + 1]])
        text = _written(coefficients)
        if all(evaluate(text, b) == values[b] for b in sizes):
            return text, True
    if len(sizes) < 2:
        return values[sizes[0]], True
    first, last = sizes[-2], sizes[-1]
    slope = max(0, -(-(values[last] - values[first]) // (last - first)))
    constant = values[last] - slope * last
    return f"max(0, {slope}*b + {constant})" if constant else f"{slope}*b", False


def _interpolated(points: list[tuple[int, int]]) -> list[Fraction]:
    """Coefficients, constant first, of the polynomial through the points (Lagrange)."""
    total = [Fraction(0)] * len(points)
    for i, (x, y) in enumerate(points):
        basis = [Fraction(1)]
        scale = Fraction(1)
        for j, (other, _) in enumerate(points):
            if i == j:
                continue
            scale *= x - other
            shifted = [Fraction(0), *basis]
            for k, value in enumerate(basis):
                shifted[k] -= other * value
            basis = shifted
        for k, value in enumerate(basis):
            total[k] += y * value / scale
    return total


def _written(coefficients: list[Fraction]) -> Expression:
    divisor = lcm(*(value.denominator for value in coefficients))
    whole = [int(value * divisor) for value in coefficients]
    if not any(whole[1:]):
        return whole[0] // divisor
    terms: list[str] = []
    for power in range(len(whole) - 1, -1, -1):
        value = whole[power]
        if value:
            factors = [] if abs(value) == 1 and power else [str(abs(value))]
            term = "*".join([*factors, *["b"] * power])
            sign = ("-" if value < 0 else "") if not terms else (" - " if value < 0 else " + ")
            terms.append(sign + term)
    text = "".join(terms)
    return text if divisor == 1 else f"({text})//{divisor}"
