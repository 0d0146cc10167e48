"""Inputs that a rank does not read: it need not load them.

A rank reads the inputs of its own stages only. In the place of the others it may pass tensors
of the same shape and dtype on the meta device, or let :func:`local_batches` drop the values
from the batches of a loader. (None would be ambiguous: it says that an input is missing, which
may be another variant of the model, and all ranks must run the same.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphpipe.errors import InputError
from graphpipe.graph.model_graph import ModelGraph

_ROOTS = ("args", "kwargs", "targets")
Batch = tuple[tuple[Any, ...], dict[str, Any], Any]
"""(args, kwargs, targets)."""


def path_of(keys: Any) -> str:
    """The path of a leaf of (args, kwargs, targets), such as ``kwargs['mask']``."""
    return _ROOTS[keys[0].idx] + pytree.keystr(tuple(keys[1:]))


def check_loaded(
    graph: ModelGraph, unread: Collection[str], values: Mapping[str, torch.Tensor]
) -> None:
    """Refuses an input that has a shape only, though a stage of this process reads it.

    Args:
        graph: The graph.
        unread: Paths of the inputs that may be on the meta device.
        values: Tensors by input name.

    Raises:
        InputError: naming the inputs.
    """
    absent = [
        item.path for item in graph.inputs if values[item.name].is_meta and item.path not in unread
    ]
    if absent:
        raise InputError(
            "An input has no values, but a stage of this rank reads it",
            where=", ".join(absent),
            expected="a tensor with values",
            got="a tensor on the meta device",
            fix="Leave out no more than Pipeline.unread_inputs names",
        )


def shape_only(batch: Batch) -> Batch:
    """``batch`` with its tensors on the meta device."""
    made: Batch = pytree.tree_map_only(torch.Tensor, _without_values, batch)
    return made


def keep_local(batch: Batch, unread: Collection[str]) -> Batch:
    """``batch`` with meta tensors in the place of the inputs in ``unread`` (paths)."""
    leaves, spec = pytree.tree_flatten_with_path(batch)
    values = [
        _without_values(value)
        if isinstance(value, torch.Tensor) and path_of(keys) in unread
        else value
        for keys, value in leaves
    ]
    kept: Batch = pytree.tree_unflatten(values, spec)
    return kept


def _without_values(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value, device="meta")


def local_batches(
    loader: Iterable[Any], unread: Collection[str], split: Callable[[Any], Batch]
) -> Iterator[Batch]:
    """Batches of a loader as (args, kwargs, targets), without what this rank does not read.

    Args:
        loader: Gives whole mini-batches, the same on every rank.
        unread: ``Pipeline.unread_inputs``.
        split: Makes (args, kwargs, targets) of what the loader gives.
    """
    for item in loader:
        yield keep_local(split(item), unread)
