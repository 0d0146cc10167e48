"""Made-up arguments for one op: right shapes and strides, values that do no harm.

Times do not depend on values, with three exceptions that matter: look-ups (rows should be
spread over the table, as in real data), offsets of embedding bags (they must ascend), and
numbers that are denormal or not finite (slow on a CPU). Floats are uniform in (0.1, 0.9),
which is also right for probabilities, logarithms and square roots.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphpipe.cost.profiler.facts import OpFacts, TensorFact
from graphpipe.graph.autocast import call_under_autocast, operator_of

_LOOKUPS: dict[str, tuple[int, int, int | None]] = {
    "embedding": (1, 0, 0),
    "embedding_bag": (1, 0, 0),
    "_embedding_bag": (1, 0, 0),
    "gather": (2, 0, None),
    "index_select": (2, 0, None),
    "take_along_dim": (1, 0, None),
    "nll_loss": (1, 0, 1),
    "nll_loss_nd": (1, 0, 1),
    "cross_entropy_loss": (1, 0, 1),
}
"""op -> (place of the indices, place of the table, dimension looked up in; None: argument 1)."""


UNCACHED_BYTES = 32 * 2**20
"""A tensor larger than this evicts itself from every cache."""
LARGE = 2**18
"""Parameters of more elements are constant: drawing them takes longer than using them."""
LARGEST_DRAWN = 2**24
"""Activations of more elements, likewise."""


class Arguments:
    """Makes arguments for one op, time and again.

    Parameters are fresh copies each time, so that no cache holds them from the repeat before
    (those larger than any cache are not copied); so is what the op changes. Other tensors are
    the same every time.

    Args:
        facts: The op.
        device: Where its tensors go.
        inplace: Whether the op changes its first argument.
    """

    def __init__(self, facts: OpFacts, device: torch.device, *, inplace: bool) -> None:
        self._leaves, self._spec = pytree.tree_flatten(facts.arguments)
        self._facts = facts
        self._device = device
        self._inplace = inplace
        self._limits = index_limits(facts)
        self._patterns: dict[str, torch.Tensor] = {}

    def make(self) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
        """Arguments, keyword arguments, and the tensors among them that want a gradient.

        The latter are the leaves behind the arguments: an op that works in place is given a
        copy, since autograd forbids changing a leaf.
        """
        made: dict[str, torch.Tensor] = {}
        wanted: list[torch.Tensor] = []
        leaves: list[Any] = []
        for leaf in self._leaves:
            if not isinstance(leaf, TensorFact):
                leaves.append(self._here(leaf))
                continue
            if leaf.name not in made:
                changed = self._inplace and not made
                tensor = self._tensor(leaf, fresh=changed or bool(leaf.state))
                if leaf.requires_grad:
                    tensor.requires_grad_()
                    wanted.append(tensor)
                    if changed:
                        tensor = tensor.clone()
                made[leaf.name] = tensor
            leaves.append(made[leaf.name])
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        if self._facts.node.target is call_under_autocast:
            args = (self._device.type, *args[1:])
        return args, kwargs, wanted

    def _here(self, leaf: Any) -> Any:
        """Devices in a captured graph are the CPU."""
        return self._device if isinstance(leaf, torch.device) else leaf

    def _tensor(self, fact: TensorFact, *, fresh: bool) -> torch.Tensor:
        pattern = self._patterns.get(fact.name)
        if pattern is None:
            limit = self._limits.get(fact.name)
            drawn = not self._facts.is_view
            pattern = tensor_of(fact, self._device, limit, drawn=drawn)
            self._patterns[fact.name] = pattern
        if not fresh or fact.nbytes > UNCACHED_BYTES:
            return pattern
        if _is_dense(fact):
            return pattern.detach().clone()
        flat = torch.as_strided(pattern, (_extent(fact),), (1,)).clone()
        return torch.as_strided(flat, fact.shape, fact.stride)


def tensor_of(
    fact: TensorFact, device: torch.device, limit: int | None = None, *, drawn: bool = True
) -> torch.Tensor:
    """A tensor of that shape, stride and dtype with harmless values.

    Args:
        fact: The tensor.
        device: Where.
        limit: For integers: exclusive upper bound of random indices; negative: offsets of bags
            over so many indices; None: zeros.
        drawn: Whether it gets values at all; an op that only makes a view reads none.
    """
    flat = torch.empty(_extent(fact), dtype=fact.dtype, device=device)
    if not drawn:
        return torch.as_strided(flat, fact.shape, fact.stride)
    large = flat.numel() > (LARGE if fact.state else LARGEST_DRAWN)
    if fact.dtype.is_complex or (large and fact.dtype.is_floating_point):
        flat.fill_(0.5)
    elif fact.dtype.is_floating_point:
        flat.uniform_(0.1, 0.9)
    elif fact.dtype is torch.bool:
        flat.fill_(True)
    elif limit is None:
        flat.zero_()
    elif limit < 0:
        bags = max(1, flat.numel())
        flat.copy_(torch.arange(flat.numel(), device=device) * -limit // bags)
    else:
        flat.random_(0, max(1, limit))
    return torch.as_strided(flat, fact.shape, fact.stride)


def runner(facts: OpFacts, device: torch.device) -> Callable[..., Any]:
    """What to call with the arguments: the operator, or a copy of an opaque module."""
    node = facts.node
    if node.op != "call_module":
        assert callable(node.target)
        return node.target
    owner = node.graph.owning_module
    assert owner is not None
    return opaque_copy(owner.get_submodule(str(node.target)), device)


def opaque_copy(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a module with parameters and buffers of its own on ``device``."""
    fresh: dict[int, Any] = {
        id(tensor): _like(tensor, device) for tensor in (*module.parameters(), *module.buffers())
    }
    return copy.deepcopy(module, fresh)


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    value = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if value.dtype.is_floating_point:
        value.uniform_(-0.1, 0.1)
    else:
        value.zero_()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value, requires_grad=tensor.requires_grad)
    return value


def index_limits(facts: OpFacts) -> dict[str, int]:
    """Exclusive upper bounds of the indices among the arguments, by name of the tensor.

    Negative for offsets of embedding bags: minus the number of indices.
    """
    target, given, _ = operator_of(facts.node)
    parts = str(target).split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    args = facts.arguments[0][len(facts.node.args) - len(given) :]
    limits: dict[str, int] = {}
    if name == "index" and len(args) > 1 and isinstance(args[0], TensorFact):
        for dimension, item in enumerate(args[1]):
            if isinstance(item, TensorFact) and item.dtype is not torch.bool:
                limits[item.name] = args[0].shape[dimension]
    if name not in _LOOKUPS:
        return limits
    indices, table, fixed = _LOOKUPS[name]
    if len(args) <= max(indices, table):
        return limits
    fact, source = args[indices], args[table]
    if isinstance(fact, TensorFact) and isinstance(source, TensorFact) and source.shape:
        along: Any = args[1] if fixed is None else fixed
        limits[fact.name] = source.shape[min(int(along), len(source.shape) - 1)]
        if "bag" in name and len(args) > 2 and isinstance(args[2], TensorFact):
            limits[args[2].name] = -fact.shape[0]
    return limits


def _extent(fact: TensorFact) -> int:
    """Elements of memory that a strided tensor spans."""
    if 0 in fact.shape:
        return 0
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(fact.shape, fact.stride, strict=True)
    )


def _is_dense(fact: TensorFact) -> bool:
    """Whether ``clone`` keeps the strides: no gaps and no overlaps."""
    count = 1
    for size in fact.shape:
        count *= size
    return count == _extent(fact)
