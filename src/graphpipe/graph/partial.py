"""What a linear over a concatenation becomes: partial products, and their sum.

``W [x_1 ... x_n] + c`` is the sum of ``W_i x_i`` and ``c``. In half precision the one product
accumulates in fp32 and is rounded once, at its end. So here: a partial product leaves in fp32,
the sum is taken in fp32 and rounded once. Backwards, the sum hands the gradient of the rounded
result on as fp32, which loses nothing, and every partial product rounds it back to what the
one product would have been given.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
import torch.nn.functional as F

_HALF = (torch.bfloat16, torch.float16)


Region = tuple[torch.dtype | None, bool]
"""An autocast region of the model: its dtype, and whether it is enabled."""


def partial_linear(
    x: torch.Tensor, weight: torch.Tensor, transposed: bool = False, region: Region | None = None
) -> torch.Tensor:
    """``x @ weight.T``, in fp32 where the product runs in half precision.

    Args:
        x: Features [..., f].
        weight: [out, f], or [f, out] if ``transposed``.
        transposed: How the weight lies.
        region: The autocast region that the linear is in, or None.

    Returns:
        [..., out], under autocast or for half-precision inputs in fp32.
    """
    if region is not None:
        with _within(x, region):
            return partial_linear(x, weight, transposed)
    dtype = _product_dtype(x)
    if dtype not in _HALF:
        return torch.matmul(x, weight) if transposed else F.linear(x, weight)
    with torch.autocast(x.device.type, enabled=False):
        if transposed:
            weight = weight.t()
        product: torch.Tensor = _WideLinear.apply(x.to(dtype), weight.to(dtype))  # type: ignore[no-untyped-call]
        return product


def join_sum(
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *partials: torch.Tensor,
    region: Region | None = None,
) -> torch.Tensor:
    """The sum of partial products and the bias, in the dtype of the unsplit linear.

    Args:
        bias: [out], or None.
        dtype: What the linear gave when the model was captured.
        partials: [..., out] each, of one dtype.
        region: The autocast region that the linear is in, or None.
    """
    if region is not None:
        with _within(partials[0], region):
            return join_sum(bias, dtype, *partials)
    if torch.is_autocast_enabled(partials[0].device.type) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(partials[0].device.type)
    total = functools.reduce(operator.add, partials)
    if bias is not None:
        total = total + bias.to(dtype)
    return total.to(dtype)


def dropout_of_piece(
    x: torch.Tensor, p: float, train: bool, dim: int, start: int, width: int
) -> torch.Tensor:
    """Dropout of a part of a concatenation, with the mask that the whole would have had.

    Args:
        x: The part.
        p: Probability of a zero.
        train: Whether anything is dropped.
        dim: Dimension of the concatenation.
        start: Where the part begins in it.
        width: Its size for the whole.
    """
    if not train or p == 0.0:
        return x
    shape = list(x.shape)
    shape[dim] = width
    mask = torch.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), p, True)
    # A copy of its own, so that the mask of the whole is not kept for the backward.
    return x * mask.narrow(dim, start, x.shape[dim]).clone()


def _within(x: torch.Tensor, region: Region) -> torch.autocast:
    dtype, enabled = region
    return torch.autocast(x.device.type, dtype=dtype, enabled=enabled, cache_enabled=False)


def _product_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which a linear of ``x`` would run."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


class _WideLinear(torch.autograd.Function):
    """A linear of half-precision tensors whose result is not rounded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        if x.device.type == "cuda":
            rows = x.reshape(-1, x.shape[-1])
            product = torch.mm(rows, weight.t(), out_dtype=torch.float32)
            return product.reshape(*x.shape[:-1], weight.shape[0])
        return F.linear(x.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].to(x.dtype)
        to_x = gradient @ weight if ctx.needs_input_grad[0] else None
        to_weight = None
        if ctx.needs_input_grad[1]:
            rows = gradient.reshape(-1, gradient.shape[-1])
            to_weight = rows.t() @ x.reshape(-1, x.shape[-1])
        return to_x, to_weight
