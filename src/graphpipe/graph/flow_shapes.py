"""Data flow through ops that move elements about: views, concatenation, creation."""

from __future__ import annotations

from dataclasses import replace

from graphpipe.graph.flow import (
    FREE,
    MIXED,
    Call,
    Flow,
    Kind,
    Number,
    Result,
    Size,
    Value,
    depends,
    mixed,
    product,
    rows,
    same,
)
from graphpipe.graph.flow_pointwise import pointwise


def reshape(call: Call) -> Result:
    """Views that keep the order of the elements."""
    value = call.first
    if not value.flow.batched:
        return same(value.flow, call)
    moved = _factorised(value.flow, value.dims, call.outputs[0])
    return same(moved, call) if moved is not None else mixed(call)


def _factorised(flow: Flow, before: tuple[Size, ...], after: tuple[Size, ...]) -> Flow | None:
    """The samples' place after a reshape, from the extents outside and inside of them."""
    outside = product(before[: flow.dim])
    inside = product(before[flow.dim + 1 :])
    if outside is None or inside is None:
        return None
    outside *= flow.outer
    inside *= flow.inner
    for dim, size in enumerate(after):
        if not depends(size):
            continue
        left, right = product(after[:dim]), product(after[dim + 1 :])
        if left is None or right is None or size is None or size[1]:
            return None
        if not left or not right or outside % left or inside % right:
            return None
        outer, inner = outside // left, inside // right
        return (
            replace(flow, dim=dim, outer=outer, inner=inner) if outer * inner == size[0] else None
        )
    return None


def permute(call: Call) -> Result:
    flow, ndim = call.first.flow, call.first.ndim
    if not flow.batched:
        return same(flow, call)
    order = list(range(ndim))
    if call.name in ("permute",):
        order = [int(d) % ndim for d in call["dims"]]
    elif call.name in ("t", "numpy_T", "mT", "adjoint", "mH"):
        if ndim >= 2:
            order[-1], order[-2] = order[-2], order[-1]
    elif call.name in ("movedim", "moveaxis"):
        source = call.dims_of("source", ndim)
        target = call.dims_of("destination", ndim)
        rest = iter(d for d in range(ndim) if d not in source)
        order = [source[target.index(d)] if d in target else next(rest) for d in range(ndim)]
    else:
        names = ("dim0", "dim1") if "dim0" in call.arguments else ("axis0", "axis1")
        a, b = (int(call[name]) % ndim if ndim else 0 for name in names)
        order[a], order[b] = order[b], order[a]
    return same(flow.at(order.index(flow.dim)), call)


def unsqueeze(call: Call) -> Result:
    flow = call.first.flow
    if not flow.batched:
        return same(flow, call)
    dim = int(call["dim"]) % (call.first.ndim + 1)
    return same(flow.at(flow.dim + (dim <= flow.dim)), call)


def squeeze(call: Call) -> Result:
    flow, ndim = call.first.flow, call.first.ndim
    if not flow.batched:
        return same(flow, call)
    gone = [d for d in call.dims_of("dim", ndim) if call.first.dims[d] == (0, 1)]
    return same(flow.at(flow.dim - sum(d < flow.dim for d in gone)), call)


def expand(call: Call) -> Result:
    """expand, expand_as, broadcast_to, repeat of other dimensions."""
    value = call.first
    if value.flow.batched:
        return same(value.flow.at(value.flow.dim + call.ndim - value.ndim), call)
    if value.flow.kind is Kind.FREE:
        return created(call, value.flow)
    return same(value.flow, call)


def repeat(call: Call) -> Result:
    value = call.first
    times = list(call.get("repeats", call.get("dims", [])))
    times = [1] * (call.ndim - len(times)) + times
    if not value.flow.batched:
        if value.flow.kind is Kind.FREE:
            return created(call, value.flow)
        return same(value.flow, call)
    dim = value.flow.dim + call.ndim - value.ndim
    factor = times[dim]
    if not isinstance(factor, int):
        return mixed(call)
    return same(replace(value.flow, dim=dim, outer=value.flow.outer * factor), call)


def repeat_interleave(call: Call) -> Result:
    value, times = call.first, call.get("repeats")
    if not value.flow.batched:
        if value.flow.kind is Kind.FREE and isinstance(times, Number):
            dim = call.dims_of("dim", value.ndim)[0] if call.get("dim") is not None else 0
            size = call.outputs[0][dim]
            if size is not None and times.size is not None and times.size[1] == 0:
                # Each of n rows b times: the sample varies fastest.
                return same(rows(dim, size[0] // times.size[0], times.size[0]), call)
            return mixed(call)
        return same(value.flow, call)
    if call.get("dim") is None or not isinstance(times, int):
        return mixed(call)
    if int(call["dim"]) % value.ndim != value.flow.dim:
        return same(value.flow, call)
    return same(replace(value.flow, inner=value.flow.inner * times), call)


def cat(call: Call) -> Result:
    values = list(call.values())
    dim = int(call.get("dim", 0)) % max(call.ndim, 1)
    flows = {value.flow for value in values}
    if len(flows) == 1 and not values[0].flow.batched:
        return same(flows.pop(), call, coupled=values[0].flow.kind is Kind.MIXED)
    if any(flow.kind in (Kind.MIXED, Kind.SUM) for flow in flows):
        return mixed(call)
    batched = [value for value in values if value.flow.batched]
    first = batched[0].flow
    if any((v.flow.dim, v.flow.layout) != (first.dim, first.layout) for v in batched):
        same_dim = all(v.flow.dim == first.dim == dim for v in batched)
        if not (same_dim and all(v.flow.inner == first.inner for v in batched)):
            return mixed(call)
    if any(v.flow.kind is Kind.PLACES for v in batched):
        return same(MIXED, call)
    powers = {value.flow.power for value in batched}
    power = powers.pop() if len(powers) == 1 else 0
    if first.dim != dim:
        return same(replace(first, power=power), call, coupled=bool(powers))
    if len(batched) != len(values):
        return mixed(call)
    outer = sum(value.flow.outer for value in batched)
    return same(rows(dim, outer, first.inner, power), call, coupled=bool(powers))


def stack(call: Call) -> Result:
    values = list(call.values())
    flows = {value.flow for value in values}
    if len(flows) > 1 and any(f.kind in (Kind.MIXED, Kind.SUM) or f.power for f in flows):
        return mixed(call)
    batched = [value.flow for value in values if value.flow.batched]
    if not batched:
        return same(values[0].flow, call, coupled=values[0].flow.kind is Kind.MIXED)
    first = batched[0]
    if any((f.dim, f.layout) != (first.dim, first.layout) for f in batched):
        return mixed(call)
    if any(f.kind is Kind.PLACES for f in batched):
        return same(MIXED, call)
    dim = int(call.get("dim", 0)) % call.ndim
    return same(first.at(first.dim + (dim <= first.dim)), call)


def cut(call: Call) -> Result:
    """slice, narrow, split, chunk, split_with_sizes, tensor_split: pieces along ``dim``."""
    value = call.first
    flow = value.flow
    if not flow.batched:
        return same(flow, call, coupled=flow.kind is Kind.MIXED)
    dim = int(call.get("dim", 0)) % value.ndim
    if dim != flow.dim:
        return same(flow, call)
    pieces = []
    for output in call.outputs:
        size = output[dim]
        if size is None or size[1] or size[0] % flow.inner or not size[0]:
            return mixed(call)
        pieces.append(size[0] // flow.inner)
    if pieces == [flow.outer]:
        return same(flow, call)
    if flow.kind is Kind.PLACES or not _aligned(call, flow):
        return mixed(call)
    return Result(tuple(replace(flow, outer=outer) for outer in pieces))


def _aligned(call: Call, flow: Flow) -> bool:
    """Whether a piece of the samples' dimension starts at a whole multiple of the batch."""
    if call.get("step", 1) != 1:
        return False
    start = call.get("start", 0)
    if isinstance(start, Number):
        return start.size is not None and start.size[1] == 0 and start.size[0] % flow.inner == 0
    return bool(start == 0)


def select(call: Call) -> Result:
    """select and unbind: a dimension goes away."""
    flow, ndim = call.first.flow, call.first.ndim
    if not flow.batched:
        return same(flow, call, coupled=flow.kind is Kind.MIXED)
    dim = int(call.get("dim", 0)) % ndim
    if dim == flow.dim:
        return mixed(call)
    return same(flow.at(flow.dim - (dim < flow.dim)), call)


def diagonal(call: Call) -> Result:
    flow, ndim = call.first.flow, call.first.ndim
    if not flow.batched:
        return same(flow, call, coupled=flow.kind is Kind.MIXED)
    dims = {int(call.get("dim1", 0)) % ndim, int(call.get("dim2", 1)) % ndim}
    if flow.dim in dims:
        return mixed(call)
    return same(flow.at(flow.dim - sum(d < flow.dim for d in dims)), call)


def matrix_wise(call: Call) -> Result:
    """Ops on the last two dimensions (tril, triu) that keep the shape."""
    flow, ndim = call.first.flow, call.first.ndim
    if flow.batched and flow.dim < ndim - 2:
        return same(flow, call)
    if flow.kind is Kind.FREE:
        return same(flow, call)
    return mixed(call)


def pad(call: Call) -> Result:
    flow, ndim = call.first.flow, call.first.ndim
    if not flow.batched:
        return same(flow, call, coupled=flow.kind is Kind.MIXED)
    widths = list(call["pad"])
    before = 2 * (ndim - 1 - flow.dim)
    if any(width != 0 for width in widths[before : before + 2]):
        return mixed(call)
    return same(flow, call)


def created(call: Call, flow: Flow = FREE) -> Result:
    """New tensors whose rows are all alike, or independent random numbers."""
    results = []
    for output in call.outputs:
        found = [dim for dim, size in enumerate(output) if depends(size)]
        only = output[found[0]] if len(found) == 1 else None
        if not found:
            power = flow.power
            fill = call.get("fill_value")
            if isinstance(fill, Number):
                if fill.size is None or fill.size[1]:
                    return mixed(call)
                power += 1
            results.append(replace(FREE, power=power))
        elif only is not None and only[1] == 0:
            results.append(rows(found[0], 1, only[0], flow.power))
        else:
            return same(MIXED, call)
    return Result(tuple(results))


def whole(call: Call) -> Result:
    """Ops on all the elements at once, such as a histogram."""
    if all(value.flow == FREE for value in call.values()):
        return created(call)
    return mixed(call)


def like(call: Call) -> Result:
    """zeros_like and kin: rows that are all alike, in the place of the model's samples."""
    flow = call.first.flow
    if flow.kind is Kind.ROWS:
        return same(replace(flow, power=0), call)
    return created(call)


def arange(call: Call) -> Result:
    output = call.outputs[0]
    if not depends(output[0]):
        return same(FREE, call)
    size = output[0]
    start, step = call.get("start", 0), call.get("step", 1)
    if size is None or size[1] or start != 0 or not isinstance(step, int):
        return same(MIXED, call)
    return same(Flow(Kind.PLACES, 0, 1, size[0], 0, step), call)


def reordered(call: Call) -> Result:
    """flip, roll: elements change places along some dimensions."""
    flow, ndim = call.first.flow, call.first.ndim
    if not flow.batched:
        return same(flow, call, coupled=flow.kind is Kind.MIXED)
    if not call.get("dims") or flow.dim in call.dims_of("dims", ndim):
        return mixed(call)
    return same(flow, call)


def one_hot(call: Call) -> Result:
    flow = call.first.flow
    if flow.kind in (Kind.SUM, Kind.MIXED, Kind.PLACES):
        return mixed(call)
    return same(flow, call)


def written(call: Call) -> Result:
    """copy_, fill_, zero_, masked_fill_: like an element-wise op whose result stays in place."""
    destination = call.first
    if call.name in ("zero_", "fill_") and len(list(call.values())) == 1:
        return same(destination.flow, call)
    if call.name == "copy_":
        source = call["src"]
        assert isinstance(source, Value)
        if source.flow.kind is Kind.FREE and not source.flow.power:
            return same(destination.flow, call)
        if destination.flow.kind is Kind.FREE:
            # A buffer that is told the batch's statistics.
            return same(source.flow, call, coupled=source.flow.kind is not Kind.FREE)
    return pointwise(call)
