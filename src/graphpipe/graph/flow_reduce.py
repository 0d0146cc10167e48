"""Data flow through reductions, scans, sorts and losses."""

from __future__ import annotations

from dataclasses import replace

from graphpipe.graph.flow import FREE, MIXED, Call, Flow, Kind, Result, Value, mixed, same, total

_SUMS = {"sum", "nansum", "count_nonzero", "trace"}
_MEANS = {"mean"}


def reduce(call: Call) -> Result:
    """Reductions over some dimensions; over the samples only sums and means are linear."""
    value = call.first
    flow = value.flow
    if flow.kind is Kind.MIXED:
        return mixed(call)
    dims = call.dims_of("dim", value.ndim)
    linear = call.name in _SUMS or call.name in _MEANS
    if flow.kind is Kind.FREE and not flow.power:
        return same(FREE, call)
    if not flow.batched:
        return same(flow, call) if linear and call.name != "count_nonzero" else mixed(call)
    keep = bool(call.get("keepdim", False))
    if flow.dim not in dims:
        left = flow.dim if keep else flow.dim - sum(d < flow.dim for d in dims)
        coupled = bool(flow.power) and not linear
        return same(replace(flow, dim=left), call, coupled=coupled)
    if not linear or flow.kind is Kind.PLACES:
        return mixed(call)
    return same(total(flow.power - (call.name in _MEANS)), call)


def along(call: Call) -> Result:
    """Ops that work along one dimension and keep the shape: softmax, cumsum, sort, topk."""
    value = call.first
    flow = value.flow
    if not flow.batched:
        if flow.kind is Kind.FREE and not flow.power:
            return same(FREE, call)
        return mixed(call)
    if flow.kind is Kind.PLACES:
        return same(MIXED, call)
    dim = int(call.get("dim", -1)) % max(value.ndim, 1)
    if dim == flow.dim:
        return mixed(call)
    return same(replace(flow, power=0), call, coupled=bool(flow.power))


def loss(call: Call) -> Result:
    """Losses with a ``reduction``: 0 none, 1 mean, 2 sum; row by row before that."""
    values = list(call.values())
    flows = [value.flow for value in values]
    if all(flow.kind is Kind.FREE and not flow.power for flow in flows):
        return same(FREE, call)
    batched = [value for value in values if value.flow.batched]
    odd = any(f.kind in (Kind.MIXED, Kind.SUM, Kind.PLACES) or f.power for f in flows)
    if odd or not batched or not _agree(batched, rowwise=call.name in _ROWWISE):
        return mixed(call)
    match int(call.get("reduction", 1)):
        case 0:
            return same(_rows_of(batched), call)
        case 1:
            return same(total(-1), call)
        case _:
            return same(total(), call)


_ROWWISE = {
    "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "multi_margin_loss",
    "multilabel_margin_loss", "cosine_embedding_loss", "triplet_margin_loss",
    "multilabel_margin_loss_forward", "nll_loss_forward",
}  # fmt: skip
"""Losses whose arguments have the samples in dimension 0, whatever their other dimensions."""


def _agree(values: list[Value], *, rowwise: bool) -> bool:
    ndim = max(value.ndim for value in values)
    found = set()
    for value in values:
        dim = value.flow.dim if rowwise else value.flow.dim + ndim - value.ndim
        found.add((dim, value.flow.layout))
    return len(found) == 1 and (not rowwise or next(iter(found))[0] == 0)


def _rows_of(values: list[Value]) -> Flow:
    largest = max(values, key=lambda value: value.ndim)
    return largest.flow


def distance(call: Call) -> Result:
    """cosine_similarity, pairwise_distance: a reduction of one dimension, with broadcasting."""
    values = list(call.values())
    if all(value.flow == FREE for value in values):
        return same(FREE, call)
    batched = [value for value in values if value.flow.batched]
    odd = any(v.flow.kind in (Kind.MIXED, Kind.SUM, Kind.PLACES) or v.flow.power for v in values)
    if odd or not batched or not _agree(batched, rowwise=False):
        return mixed(call)
    ndim = max(value.ndim for value in values)
    default = -1 if call.name == "pairwise_distance" else 1
    dim = int(call.get("dim", default)) % ndim
    flow = _rows_of(batched)
    place = flow.dim + ndim - max(v.ndim for v in batched)
    if place == dim:
        return mixed(call)
    keep = bool(call.get("keepdim", False))
    return same(flow.at(place - (dim < place and not keep)), call)
