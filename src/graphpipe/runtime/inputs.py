"""Inputs that a rank does not read: it need not load them.

A rank reads the inputs of its own stages only. For the others it may pass None, or let
:func:`local_batches` drop them from the batches of a loader.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphpipe.errors import InputError
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.runtime.rank_program import dtype_of

_ROOTS = ("args", "kwargs", "targets")
Batch = tuple[tuple[Any, ...], dict[str, Any], Any]
"""(args, kwargs, targets)."""


def path_of(keys: Any) -> str:
    """The path of a leaf of (args, kwargs, targets), such as ``kwargs['mask']``."""
    return _ROOTS[keys[0].idx] + pytree.keystr(tuple(keys[1:]))


def fill_absent(
    graph: ModelGraph,
    unread: Collection[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    targets: Any,
    batch_size: int | None,
) -> Batch:
    """The call with stand-ins (meta tensors of the right shape) for inputs given as None.

    Args:
        graph: The graph.
        unread: Paths of the inputs that may be None.
        args: Positional inputs.
        kwargs: Keyword inputs.
        targets: Targets.
        batch_size: Samples, if given by the caller.

    Raises:
        InputError: if nothing says how many samples there are, or they disagree.
    """
    whole: Batch = (args, dict(kwargs), targets)
    by_path = {item.path: item for item in graph.inputs}
    leaves, spec = pytree.tree_flatten_with_path(whole, is_leaf=lambda value: value is None)
    absent = [
        i
        for i, (keys, value) in enumerate(leaves)
        if value is None and path_of(keys) in unread and path_of(keys) in by_path
    ]
    if not absent:
        return whole
    samples = batch_size
    for keys, value in leaves:
        item = by_path.get(path_of(keys))
        if samples is None and item is not None and item.per_sample and value is not None:
            samples = value.shape[0] // (item.spec.rows_per_sample or 1)
    if samples is None:
        raise InputError(
            "Nothing says how many samples the mini-batch has",
            where=", ".join(path_of(leaves[i][0]) for i in absent),
            expected="at least one per-sample input, or batch_size=...",
            fix="Pass batch_size on ranks that read no input",
        )
    values = [value for _, value in leaves]
    for i in absent:
        spec_of = by_path[path_of(leaves[i][0])].spec
        values[i] = torch.empty(
            spec_of.concrete_shape(samples), dtype=dtype_of(spec_of.dtype), device="meta"
        )
    filled: Batch = pytree.tree_unflatten(values, spec)
    return filled


def keep_local(batch: Batch, unread: Collection[str]) -> Batch:
    """``batch`` with None in the place of the inputs in ``unread`` (paths)."""
    leaves, spec = pytree.tree_flatten_with_path(batch)
    values = [None if path_of(keys) in unread else value for keys, value in leaves]
    kept: Batch = pytree.tree_unflatten(values, spec)
    return kept


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
