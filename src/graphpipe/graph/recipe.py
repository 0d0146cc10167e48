"""What one op does with arguments of given shapes, found out once.

The op is executed on tensors without data under autograd, with detached inputs, so that
what it saves, which outputs need a gradient and what its backward costs are its own alone.
Most ops run on the ``meta`` device, which is quick. Those that would choose another kernel
there than on a real device (attention, recurrent nets, autocast regions) and ops that meta
does not know run on fake CPU tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from graphpipe.graph.autocast import call_under_autocast
from graphpipe.graph.work import NOTHING, Counter, Counts


@dataclass(frozen=True)
class TensorMeta:
    """A tensor without data.

    Attributes:
        shape: Its shape.
        stride: Its strides, in elements.
        offset: Offset in its storage, in elements.
        dtype: Its dtype.
        requires_grad: Whether it needs a gradient.
        storage: Number of its storage.
        nbytes: Bytes of its storage (of a view: of the whole base).
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool
    storage: int
    nbytes: int

    @property
    def rows(self) -> int:
        """Elements without the last dimension."""
        count = 1
        for size in self.shape[:-1]:
            count *= size
        return count

    def moved(self, storage: int) -> TensorMeta:
        return replace(self, storage=storage)

    def grown(self) -> TensorMeta:
        """The same, needing a gradient."""
        return self if self.requires_grad else replace(self, requires_grad=True)


@dataclass(frozen=True)
class Output:
    """A tensor that the op returns; ``alias`` is the input whose storage it shares."""

    meta: TensorMeta
    alias: int | None


@dataclass(frozen=True)
class Saved:
    """Memory kept for the backward: an input's, an output's, or the op's own."""

    kind: Literal["input", "output", "inner"]
    index: int
    nbytes: int


@dataclass(frozen=True)
class Recipe:
    """What an op does.

    Attributes:
        outputs: The tensors that it returns.
        leaves: None for each of them, a 1-tuple for every other leaf.
        spec: Structure of what it returns.
        saves: What autograd keeps.
        mutates: Inputs that it writes to.
        forward: Work of the forward.
        backward: Work of the backward.
    """

    outputs: tuple[Output, ...]
    leaves: tuple[tuple[object] | None, ...]
    spec: pytree.TreeSpec
    saves: tuple[Saved, ...]
    mutates: tuple[int, ...]
    forward: Counts
    backward: Counts


def recipe_key(
    target: Callable[..., Any], spec: pytree.TreeSpec, leaves: Sequence[Any], gradients: bool
) -> object:
    """What equal applications of an op have in common; None where that cannot be told."""
    storages: dict[int, int] = {}
    parts: list[object] = [target, spec, gradients]
    for leaf in leaves:
        if isinstance(leaf, TensorMeta):
            place = storages.setdefault(leaf.storage, len(storages))
            parts.append(replace(leaf, storage=place))
        else:
            parts.append((type(leaf), leaf))
    key = tuple(parts)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def cooked(
    target: Callable[..., Any],
    spec: pytree.TreeSpec,
    leaves: Sequence[Any],
    mode: FakeTensorMode,
    *,
    gradients: bool,
) -> Recipe:
    """Executes an op without data and notes what it does.

    Args:
        target: The op.
        spec: Structure of (args, kwargs).
        leaves: Their leaves; tensors as :class:`TensorMeta`.
        mode: Where the fake tensors live.
        gradients: Whether autograd records.
    """
    if _runs_on_meta(target, leaves):
        with torch.set_grad_enabled(gradients), contextlib.suppress(NotImplementedError):
            return _Kitchen(target, spec, leaves, "meta").cook()
    with mode, torch.set_grad_enabled(gradients):
        return _Kitchen(target, spec, leaves, "cpu").cook()


_CHOOSE_BY_DEVICE = {"scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"}


def _runs_on_meta(target: Any, leaves: Sequence[Any]) -> bool:
    if getattr(target, "namespace", "") != "aten" or target._opname in _CHOOSE_BY_DEVICE:
        return False
    return any(isinstance(leaf, TensorMeta) for leaf in leaves)


class _Kitchen:
    def __init__(
        self,
        target: Callable[..., Any],
        spec: pytree.TreeSpec,
        leaves: Sequence[Any],
        device: str,
    ) -> None:
        self._device = torch.device(device)
        self._target = target
        self._spec = spec
        self._leaves = leaves
        self._given = [leaf for leaf in leaves if isinstance(leaf, TensorMeta)]
        # Storage of a fake tensor -> the input it stands for.
        self._inputs: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []

    def cook(self) -> Recipe:
        tensors, wanted = self._fakes()
        rest = iter(tensors)
        flat = [next(rest) if isinstance(leaf, TensorMeta) else leaf for leaf in self._leaves]
        flat = [self._device if isinstance(leaf, torch.device) else leaf for leaf in flat]
        args, kwargs = pytree.tree_unflatten(flat, self._spec)
        kept: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        counter = Counter()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), counter:
            result = self._target(*args, **kwargs)
        values, spec = pytree.tree_flatten(result)
        returned = [value for value in values if isinstance(value, torch.Tensor)]
        return Recipe(
            outputs=tuple(self._output(value) for value in returned),
            leaves=tuple(None if isinstance(v, torch.Tensor) else (v,) for v in values),
            spec=spec,
            saves=self._saves(kept, returned),
            mutates=self._mutated(args, kwargs, tensors),
            forward=counter.counts,
            backward=_backward(returned, wanted),
        )

    def _fakes(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Fake inputs for the op, and the leaves of the autograd graph among them."""
        bases: dict[int, torch.Tensor] = {}
        writes = _is_mutable(
            self._leaves[3] if self._target is call_under_autocast else self._target
        )
        tensors: list[torch.Tensor] = []
        wanted: list[torch.Tensor] = []
        for i, meta in enumerate(self._given):
            leaf = self._fake(meta, bases)
            if meta.requires_grad and torch.is_grad_enabled():
                leaf.requires_grad_()
                wanted.append(leaf)
                # A leaf must not be written to: an op in place gets a copy.
                tensor = leaf.clone() if writes and i == 0 else leaf
            else:
                tensor = leaf
            self._inputs.setdefault(self._key(leaf), i)
            self._inputs.setdefault(self._key(tensor), i)
            tensors.append(tensor)
        return tensors, wanted

    def _fake(self, meta: TensorMeta, bases: dict[int, torch.Tensor]) -> torch.Tensor:
        """A tensor of that shape; tensors on one storage share it here as well."""
        base = bases.get(meta.storage)
        if base is None:
            fresh = torch.empty_strided(
                meta.shape, meta.stride, dtype=meta.dtype, device=self._device
            )
            if meta.offset == 0 and fresh.untyped_storage().nbytes() == meta.nbytes:
                bases[meta.storage] = fresh.detach()
                return fresh
            base = torch.empty(meta.nbytes, dtype=torch.uint8, device=self._device)
            bases[meta.storage] = base
        if base.dtype != meta.dtype:
            base = base.as_strided((meta.nbytes // base.element_size(),), (1,), 0).view(meta.dtype)
        return base.as_strided(meta.shape, meta.stride, meta.offset).detach()

    def _key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        return int(storage._cdata)

    def _output(self, tensor: torch.Tensor) -> Output:
        key = self._key(tensor)
        return Output(
            TensorMeta(
                tuple(tensor.shape),
                tuple(tensor.stride()),
                int(tensor.storage_offset()),
                tensor.dtype,
                tensor.requires_grad,
                key,
                tensor.untyped_storage().nbytes(),
            ),
            self._inputs.get(key),
        )

    def _saves(
        self, kept: Sequence[torch.Tensor], returned: Sequence[torch.Tensor]
    ) -> tuple[Saved, ...]:
        outputs: dict[int, int] = {}
        for i, tensor in enumerate(returned):
            outputs.setdefault(self._key(tensor), i)
        found: dict[int, Saved] = {}
        for tensor in kept:
            key = self._key(tensor)
            nbytes = tensor.untyped_storage().nbytes()
            if key in self._inputs:
                found[key] = Saved("input", self._inputs[key], nbytes)
            elif key in outputs:
                found[key] = Saved("output", outputs[key], nbytes)
            else:
                found.setdefault(key, Saved("inner", len(found), nbytes))
        return tuple(found.values())

    def _mutated(self, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        target, call_args = _operator(self._target, args)
        schema = getattr(target, "_schema", None)
        if schema is None:
            return ()
        given = dict(zip((a.name for a in schema.arguments), call_args, strict=False))
        given.update(kwargs)
        written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
        written.update(_running_statistics(target, given))
        ids = {
            id(leaf)
            for name in written
            for leaf in pytree.tree_leaves(given.get(name))
            if isinstance(leaf, torch.Tensor)
        }
        return tuple(i for i, tensor in enumerate(tensors) if id(tensor) in ids)


def _backward(returned: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> Counts:
    """Work of the backward from the outputs to the inputs that need a gradient."""
    roots = [tensor for tensor in returned if tensor.requires_grad]
    if not roots or not wanted:
        return NOTHING
    seeds = [torch.empty_like(root) for root in roots]
    with Counter() as counter:
        torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
    counts: Counts = counter.counts
    return counts


def _operator(target: Callable[..., Any], args: Any) -> tuple[Any, Any]:
    if target is call_under_autocast:
        return args[3], args[4:]
    return target, args


def _is_mutable(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _running_statistics(target: Any, given: dict[str, Any]) -> tuple[str, ...]:
    """Running statistics that a normalisation updates although its schema does not say so."""
    name = getattr(target, "_opname", "")
    if name not in ("batch_norm", "native_batch_norm", "cudnn_batch_norm", "instance_norm"):
        return ()
    training = given.get("training", given.get("use_input_stats", False))
    return ("running_mean", "running_var") if training else ()
