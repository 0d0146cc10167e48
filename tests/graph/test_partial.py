"""Partial products add up to the product, in half precision rounded once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graphpipe.graph.partial import dropout_of_piece, join_sum, partial_linear


def parts(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 64, generator=generator).to(dtype)
    weight = torch.randn(8, 64, generator=generator).to(dtype)
    return x, weight, torch.randn(8, generator=generator).to(dtype)


def split(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    pieces = [partial_linear(x[..., a:b], weight[:, a:b]) for a, b in ((0, 20), (20, 50), (50, 64))]
    return join_sum(bias, x.dtype, *pieces)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_sum_is_the_linear(dtype: torch.dtype) -> None:
    x, weight, bias = parts(dtype)
    for given in (bias, None):
        got, want = split(x, weight, given), F.linear(x, weight, given)
        torch.testing.assert_close(got, want)
        assert got.dtype is dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x, weight, bias = parts(dtype)
    assert partial_linear(x, weight).dtype is torch.float32
    got = split(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), bias.double())
    # The nearest number of that precision, but for ties that fp32 summation may turn.
    wrong = (got != exact.to(dtype)).float().mean()
    assert wrong < 0.02
    naive = sum(F.linear(x[..., a:b], weight[:, a:b]) for a, b in ((0, 20), (20, 50), (50, 64)))
    assert isinstance(naive, torch.Tensor)
    assert (naive + bias != exact.to(dtype)).float().mean() > 0.1


def test_gradients_in_half_precision_are_those_of_the_linear() -> None:
    x, weight, bias = parts(torch.bfloat16)
    runs = []
    for forward in (split, F.linear):
        leaves = [value.clone().requires_grad_() for value in (x, weight, bias)]
        forward(*leaves).float().square().sum().backward()
        runs.append([leaf.grad for leaf in leaves])
    for got, want in zip(*runs, strict=True):
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.5)


def test_under_autocast_partial_products_leave_in_fp32() -> None:
    x, weight, bias = parts(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert partial_linear(x, weight).dtype is torch.float32
        got, want = split(x, weight, bias), F.linear(x, weight, bias)
    assert got.dtype is want.dtype is torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)
    wide = x.double()
    with torch.autocast("cpu", torch.bfloat16):
        assert partial_linear(wide, weight.double()).dtype is torch.float64


def test_a_weight_that_lies_the_other_way() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, _ = parts(dtype)
        got = partial_linear(x, weight.t().contiguous(), True)
        torch.testing.assert_close(got, partial_linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_piece_has_its_part_of_the_mask_of_the_whole(dtype: torch.dtype) -> None:
    x = torch.randn(7, 12, dtype=dtype)
    torch.manual_seed(5)
    want = F.dropout(x, 0.4, True)
    for start, length in ((0, 5), (5, 4), (9, 3)):
        torch.manual_seed(5)
        piece = x[:, start : start + length]
        got = dropout_of_piece(piece, 0.4, True, -1, start, 12)
        torch.testing.assert_close(got, want[:, start : start + length])
    assert dropout_of_piece(x, 0.4, False, -1, 0, 12) is x
