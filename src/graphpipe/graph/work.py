"""Arithmetic, memory traffic and kernels of an op, counted on fake tensors.

FLOPs are those of ``torch.utils.flop_counter`` (its registry of formulas), so that their
sum over a graph equals what its eager counter shows. Bytes are what the kernels must at
least read and write: every tensor argument and result once, but of a table that is looked
up only the rows that are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


@dataclass(frozen=True)
class Counts:
    """FLOPs, bytes and kernel launches of one direction of an op."""

    flops: int = 0
    bytes: int = 0
    kernels: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.flops + other.flops, self.bytes + other.bytes, self.kernels + other.kernels
        )


NOTHING = Counts()


class Counter(TorchDispatchMode):
    """Counts the kernels that run within the ``with`` block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counts()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        formula = flop_registry.get(func._overloadpacket)
        if formula is None and func is not torch.ops.prim.device.default:
            # As the eager counter does: a composite op counts as what it consists of.
            with self:
                parts = func.decompose(*args, **given)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **given)
        flops = 0 if formula is None else int(formula(*args, **given, out_val=out))
        if flops or not _is_free(func):
            self.counts += Counts(flops, _traffic(func, args, given, out), 1)
        return out


_FREE = {
    "alias", "detach", "empty", "empty_like", "empty_strided", "new_empty",
    "new_empty_strided", "lift", "lift_fresh", "_unsafe_view", "_reshape_alias", "is_same_size",
    "device", "sym_size", "sym_numel", "sym_stride", "sym_storage_offset", "resize_", "set_",
    "_local_scalar_dense", "_efficientzerotensor", "_fused_sdp_choice", "view_of",
}  # fmt: skip

_Traffic = Callable[[Any, Any, Any], int]


def _is_free(func: Any) -> bool:
    """Whether an op launches nothing: views and allocations."""
    if func._opname in _FREE:
        return True
    returns = func._schema.returns
    return bool(returns) and all(
        item.alias_info is not None and not item.alias_info.is_write for item in returns
    )


def _traffic(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    special = _TRAFFIC.get(func._opname)
    if special is not None:
        return special(args, kwargs, out)
    read = {id(leaf): leaf for leaf in pytree.tree_leaves((args, kwargs)) if _tensor(leaf)}
    written = {id(leaf): leaf for leaf in pytree.tree_leaves(out) if _tensor(leaf)}
    total = sum(_nbytes(leaf) for leaf in read.values())
    return total + sum(_nbytes(leaf) for leaf in written.values())


def _tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes that a full pass over a tensor moves; an expanded one is no larger than its data."""
    size = tensor.numel() * tensor.element_size()
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride == 0 and extent > 1:
            size //= extent
    return size


def _size(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        return _nbytes(leaf)
    return sum(_nbytes(item) for item in pytree.tree_leaves(leaf) if _tensor(item))


def _lookup(args: Any, _kwargs: Any, out: Any) -> int:
    """Rows of a table: the indices, the rows that are touched, the result."""
    return 2 * _size(out) + _size(args[1:])


def _bag(args: Any, _kwargs: Any, out: Any) -> int:
    weight, indices = args[0], args[1]
    row = weight.shape[1] * weight.element_size()
    return int(indices.numel() * row) + _size(args[1:]) + _size(out)


def _write(_args: Any, _kwargs: Any, out: Any) -> int:
    return _size(out)


def _copy(args: Any, _kwargs: Any, _out: Any) -> int:
    return _size(args[0]) + _size(args[1])


def _scatter(position: int) -> _Traffic:
    def traffic(args: Any, _kwargs: Any, _out: Any) -> int:
        """In place: the values and their indices, and the places they go to."""
        values = args[position] if len(args) > position else None
        return 2 * _size(values) + _size(args[1:position])

    return traffic


def _slice_backward(args: Any, _kwargs: Any, out: Any) -> int:
    return _size(args[0]) + _size(out)


_TRAFFIC: dict[str, _Traffic] = {
    "embedding": _lookup,
    "index": _lookup,
    "index_select": lambda args, _k, out: 2 * _size(out) + _size(args[2]),
    "gather": lambda args, _k, out: 2 * _size(out) + _size(args[2]),
    "_embedding_bag": _bag,
    "_embedding_bag_forward_only": _bag,
    "embedding_dense_backward": lambda args, _k, out: _size(args[:2]) + _size(out),
    "zeros": _write,
    "ones": _write,
    "full": _write,
    "zeros_like": _write,
    "ones_like": _write,
    "full_like": _write,
    "new_zeros": _write,
    "new_ones": _write,
    "new_full": _write,
    "zero_": _write,
    "fill_": _write,
    "copy_": _copy,
    "index_put_": _scatter(2),
    "_index_put_impl_": _scatter(2),
    "index_add_": _scatter(3),
    "scatter_": _scatter(3),
    "scatter_add_": _scatter(3),
    "slice_backward": _slice_backward,
    "select_backward": _slice_backward,
}
