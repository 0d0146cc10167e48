"""Sums the gradients of parameters that several ranks hold.

Replicas, copies and tied weights are one case: the ranks that hold a canonical name sum its
gradients before the optimizer step. Losses are weighted (see
:mod:`graphpipe.runtime.losses`), so the sum is the mini-batch's gradient.

A parameter without a gradient on every rank keeps ``None``, as in a single process (an
optimizer skips it, where zeros would still decay it); without one on some ranks only, those
count as zeros. Each bucket carries a mark per parameter for that, so no message is added.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from graphpipe.runtime.transport import Handle, Transport, Wait

BUCKET_BYTES = 25 * 2**20
"""Size from which a bucket is closed."""


@dataclass(eq=False)
class _Bucket:
    group: tuple[int, ...]
    names: list[str]
    flat: torch.Tensor | None = None
    handle: Handle | None = None


class GradientReducer:
    """The reductions of one rank.

    Args:
        rank: The rank.
        transport: Where the collectives go.
        parameters: This rank's trainable parameters by canonical name, in model order.
        groups: By canonical name the ranks that hold it, for those that several hold.
        stages: By canonical name, the stages of this rank with a backward that read it.
        sparse: Names of parameters whose gradient is sparse on every rank.
    """

    def __init__(
        self,
        rank: int,
        transport: Transport,
        parameters: Mapping[str, torch.nn.Parameter],
        groups: Mapping[str, tuple[int, ...]],
        stages: Mapping[str, Collection[int]],
        sparse: Collection[str] = (),
    ) -> None:
        self._rank = rank
        self._transport = transport
        self._parameters = parameters
        self._stages = stages
        self._sparse = [name for name in parameters if name in groups and name in sparse]
        self._groups = groups
        dense = [name for name in parameters if name in groups and name not in sparse]
        self._buckets = _buckets(parameters, groups, dense)
        self._pending: set[int] = set()
        self._next = 0

    @property
    def has_work(self) -> bool:
        return bool(self._buckets or self._sparse)

    def begin(self) -> None:
        """Starts a step: nothing is ready."""
        self._pending = {stage for stages in self._stages.values() for stage in stages}
        self._next = 0

    def after_backward(self, stage: int) -> None:
        """Launches the buckets that are complete, now that ``stage`` has no more backwards."""
        self._pending.discard(stage)
        # In order: every member of a group must launch its collectives in the same order.
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if any(self._pending & set(self._stages[name]) for name in bucket.names):
                return
            self._launch(bucket)
            self._next += 1

    def finish(self) -> Wait:
        """Launches what is left and yields until every gradient is summed."""
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        self._next = len(self._buckets)
        for name in self._sparse:
            yield from self._reduce_sparse(name)
        for bucket in self._buckets:
            assert bucket.handle is not None
            while not bucket.handle.poll():
                yield
            self._unpack(bucket)

    def _launch(self, bucket: _Bucket) -> None:
        parts: list[torch.Tensor] = []
        marks: list[float] = []
        for name in bucket.names:
            parameter = self._parameters[name]
            gradient = parameter.grad
            if gradient is None:
                parts.append(torch.zeros_like(parameter).reshape(-1))
                marks.append(0.0)
            else:
                if gradient.is_sparse:
                    gradient = gradient.to_dense()
                parts.append(gradient.reshape(-1))
                marks.append(1.0)
            parameter.grad = None
        parts.append(torch.tensor(marks, dtype=parts[0].dtype, device=parts[0].device))
        bucket.flat = torch.cat(parts)
        bucket.handle = self._transport.all_reduce(
            self._rank, bucket.group, bucket.flat, lane="gradient"
        )

    def _unpack(self, bucket: _Bucket) -> None:
        flat = bucket.flat
        assert flat is not None
        marks = flat[-len(bucket.names) :].tolist()
        at = 0
        for name, mark in zip(bucket.names, marks, strict=True):
            parameter = self._parameters[name]
            count = parameter.numel()
            if mark:
                parameter.grad = flat[at : at + count].view(parameter.shape)
            at += count
        bucket.flat = None
        bucket.handle = None

    def _reduce_sparse(self, name: str) -> Wait:
        """Every member's rows, one after the other; equal indices are summed."""
        parameter = self._parameters[name]
        group = self._groups[name]
        gradient = parameter.grad
        here = group.index(self._rank)
        counts = torch.full((len(group),), 0, dtype=torch.int64)
        if gradient is not None:
            gradient = gradient.coalesce()
            counts[here] = gradient._nnz() + 1  # 0 says that there is no gradient at all
        yield from self._sum(group, counts)
        sizes = [max(0, count - 1) for count in counts.tolist()]
        if not counts.any():
            return
        total, start = sum(sizes), sum(sizes[:here])
        indices = torch.zeros((1, total), dtype=torch.int64, device=parameter.device)
        shape = (total, *parameter.shape[1:])
        values = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
        if gradient is not None:
            indices[:, start : start + sizes[here]] = gradient.indices()
            values[start : start + sizes[here]] = gradient.values()
        yield from self._sum(group, indices)
        yield from self._sum(group, values)
        joined = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
        parameter.grad = joined.coalesce()

    def _sum(self, group: tuple[int, ...], tensor: torch.Tensor) -> Wait:
        handle = self._transport.all_reduce(self._rank, group, tensor, lane="gradient")
        while not handle.poll():
            yield


def _buckets(
    parameters: Mapping[str, torch.nn.Parameter],
    groups: Mapping[str, tuple[int, ...]],
    names: Iterable[str],
) -> list[_Bucket]:
    """Buckets of one group and dtype each, from the last parameter of the model to the first:
    about the order in which a backward completes them, and the same on every member."""
    open_buckets: dict[tuple[tuple[int, ...], torch.dtype], _Bucket] = {}
    sizes: dict[int, int] = {}
    closed: list[_Bucket] = []
    order: Sequence[str] = list(names)
    for name in reversed(order):
        parameter = parameters[name]
        key = (groups[name], parameter.dtype)
        bucket = open_buckets.get(key)
        if bucket is None:
            bucket = open_buckets[key] = _Bucket(groups[name], [])
            closed.append(bucket)
        bucket.names.append(name)
        size = sizes.get(id(bucket), 0) + parameter.numel() * parameter.element_size()
        sizes[id(bucket)] = size
        if size >= BUCKET_BYTES:
            del open_buckets[key]
    return closed


def ranks_by_name(
    held: Sequence[Collection[str]], names: Iterable[str]
) -> dict[str, tuple[int, ...]]:
    """By canonical name, the ranks that hold it, for those that more than one holds.

    Args:
        held: By rank, the names that it trains.
        names: All names, in model order.
    """
    out: dict[str, tuple[int, ...]] = {}
    for name in names:
        ranks = tuple(rank for rank, mine in enumerate(held) if name in mine)
        if len(ranks) > 1:
            out[name] = ranks
    return out
