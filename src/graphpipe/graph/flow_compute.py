"""Data flow through products, convolutions, normalisations, look-ups and recurrent nets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphpipe.graph.flow import (
    FREE,
    MIXED,
    Call,
    Kind,
    Result,
    Value,
    mixed,
    rows,
    same,
    total,
)


def _plain(values: Sequence[Value]) -> bool:
    """Whether all values are constants or rows, so that a per-sample rule applies."""
    return all(v.flow.kind in (Kind.FREE, Kind.ROWS) and not v.flow.power for v in values)


def linear(call: Call) -> Result:
    """x W^T + bias: the last dimension is contracted."""
    x, weight, bias = call["input"], call["weight"], call.get("bias")
    if x.flow.kind is Kind.SUM and weight.flow == FREE and bias is None:
        return same(x.flow, call)
    others = [weight, *([bias] if bias is not None else [])]
    if any(value.flow != FREE for value in others) or not _plain([x]):
        return mixed(call)
    if x.flow.batched and x.flow.dim == x.ndim - 1:
        return mixed(call)
    return same(x.flow, call)


def matmul(call: Call) -> Result:
    """matmul, mm, bmm, mv, dot and their versions with an added tensor."""
    left, right = _factors(call)
    added = [value for value in call.values() if value is not left and value is not right]
    product = _product(call, left, right)
    if not added:
        return product
    flow = product.flows[0]
    other = added[0]
    if flow.kind is Kind.MIXED or product.coupled:
        return mixed(call)
    if flow.kind is Kind.FREE:
        return same(other.flow, call) if other.flow == FREE else mixed(call)
    if flow.kind is not Kind.ROWS:
        return mixed(call)
    if other.flow == FREE:
        return product
    place = other.flow.dim + call.ndim - other.ndim
    agree = _plain([other]) and place == flow.dim and other.flow.layout == flow.layout
    return product if agree else mixed(call)


def _factors(call: Call) -> tuple[Value, Value]:
    for names in (("batch1", "batch2"), ("mat1", "mat2"), ("mat", "vec"), ("vec1", "vec2")):
        if all(isinstance(call.get(name), Value) for name in names):
            return call[names[0]], call[names[1]]
    tensors = list(call.values())
    return tensors[0], tensors[1]


def _product(call: Call, a: Value, b: Value) -> Result:
    flows = (a.flow, b.flow)
    if any(f.kind in (Kind.MIXED, Kind.PLACES) for f in flows):
        return mixed(call)
    if any(f.kind is Kind.SUM for f in flows):
        if a.flow.kind is Kind.SUM and b.flow.kind is Kind.FREE:
            return same(total(a.flow.power + b.flow.power), call)
        if b.flow.kind is Kind.SUM and a.flow.kind is Kind.FREE:
            return same(total(a.flow.power + b.flow.power), call)
        return mixed(call)
    power = a.flow.power + b.flow.power
    contracted_a = a.flow.batched and a.flow.dim == a.ndim - 1
    contracted_b = b.flow.batched and b.flow.dim == max(b.ndim - 2, 0)
    if not a.flow.batched and not b.flow.batched:
        return same(FREE if not power else MIXED, call, coupled=bool(power))
    if contracted_a and contracted_b:
        # A sum over the samples, as in a covariance.
        return same(total(power), call) if a.flow.layout == b.flow.layout else mixed(call)
    if contracted_a or contracted_b:
        return mixed(call)
    place_a = _kept(call, a, left=True)
    place_b = _kept(call, b, left=False)
    both = place_a is not None and place_b is not None
    if both and (place_a != place_b or a.flow.layout != b.flow.layout):
        return mixed(call)
    place = place_a if place_a is not None else place_b
    source = a if place_a is not None else b
    assert place is not None
    return same(rows(place, *source.flow.layout, power), call)


def _kept(call: Call, value: Value, *, left: bool) -> int | None:
    """Where a factor's samples are in the product; None if it has none."""
    if not value.flow.batched:
        return None
    from_end = value.ndim - 1 - value.flow.dim
    if from_end >= 2:
        other = call.ndim - 1 - from_end
        if value.ndim >= 2 and _vector_partner(call, value):
            other += 1
        return other
    if left:
        # Rows of the left factor: the last dimension of the product is the right one's.
        return call.ndim - 1 - (0 if _vector_partner(call, value) else 1)
    return call.ndim - 1


def _vector_partner(call: Call, value: Value) -> bool:
    """Whether the other factor is a vector, so that the product has one dimension less."""
    a, b = _factors(call)
    other = b if value is a else a
    return other.ndim == 1


def einsum(call: Call) -> Result:
    operands = list(call.values())
    text = call["equation"].replace(" ", "")
    if any(o.flow.kind not in (Kind.FREE, Kind.ROWS, Kind.SUM) for o in operands) or "." in text:
        return mixed(call)
    if "->" in text:
        left, _, right = text.partition("->")
    else:
        left = text
        letters = sorted(set(left) - {","})
        right = "".join(letter for letter in letters if left.count(letter) == 1)
    terms = left.split(",")
    labels = {
        (term[o.flow.dim], o.flow.layout)
        for term, o in zip(terms, operands, strict=True)
        if o.flow.batched
    }
    power = sum(o.flow.power for o in operands)
    sums = sum(o.flow.kind is Kind.SUM for o in operands)
    if not labels:
        if sums == 1:
            return same(total(power), call)
        return same(FREE, call) if not sums and not power else mixed(call)
    if len(labels) != 1 or sums:
        return mixed(call)
    label, layout = labels.pop()
    if label in right:
        return same(rows(right.index(label), *layout, power), call)
    return same(total(power), call)


def leading(call: Call) -> Result:
    """Ops that treat dimension 0 as the batch: convolutions, pooling, group norms, images."""
    values = list(call.values())
    x = values[0]
    if not _plain(values):
        return mixed(call)
    if any(value.flow.batched for value in values[1:]):
        ok = all(
            v.flow.dim == 0 and v.flow.layout == x.flow.layout for v in values if v.flow.batched
        )
        if not (ok and x.flow.batched):
            return mixed(call)
    if not x.flow.batched:
        return same(FREE, call)
    return same(x.flow, call) if x.flow.dim == 0 else mixed(call)


def batch_norm(call: Call) -> Result:
    """Statistics over the batch in training; per sample in evaluation."""
    x = call.first
    if not _plain(list(call.values())):
        return mixed(call)
    training = bool(call.get("training", call.get("use_input_stats", False)))
    if call.name == "instance_norm":
        training = training and call.get("running_mean") is not None
    if not x.flow.batched:
        return same(FREE, call)
    if x.flow.dim != 0:
        return mixed(call)
    return same(x.flow, call, coupled=training)


def layer_norm(call: Call) -> Result:
    x = call.first
    if not _plain(list(call.values())):
        return mixed(call)
    if not x.flow.batched:
        return same(FREE, call)
    return (
        same(x.flow, call) if x.flow.dim < x.ndim - len(call["normalized_shape"]) else mixed(call)
    )


def attention(call: Call) -> Result:
    """scaled_dot_product_attention(query, key, value, mask)."""
    values = list(call.values())
    if not _plain(values):
        return mixed(call)
    found = set()
    for value in values:
        if value.flow.batched:
            if value.flow.dim >= value.ndim - 2:
                return mixed(call)
            found.add((value.flow.dim + call.ndim - value.ndim, value.flow.layout))
    if not found:
        return same(FREE, call)
    if len(found) != 1:
        return mixed(call)
    place, layout = found.pop()
    return same(rows(place, *layout), call)


def embedding(call: Call) -> Result:
    weight, indices = call["weight"], call["indices"]
    if weight.flow != FREE or not _plain([indices]):
        return mixed(call)
    # A gradient that is divided by how often an index occurs depends on the other samples.
    return same(indices.flow, call, coupled=call.get("scale_grad_by_freq") is True)


def embedding_bag(call: Call) -> Result:
    """Bags of a fixed number of indices for each sample (offsets are a multiple of it)."""
    weight, indices, offsets = call["weight"], call["indices"], call["offsets"]
    if weight.flow != FREE or not _plain([indices]):
        return mixed(call)
    extra = call.get("per_sample_weights")
    if isinstance(extra, Value) and extra.flow.batched and extra.flow != indices.flow:
        return mixed(call)
    if not indices.flow.batched:
        return same(FREE, call) if offsets.flow == FREE else mixed(call)
    fixed = offsets.flow.kind is Kind.PLACES and indices.flow.outer == 1
    if not fixed or indices.flow.inner != offsets.flow.inner * offsets.flow.step:
        return mixed(call)
    # Further outputs (which bag an index belongs to, bag sizes) have their own rows per sample.
    return Result(
        tuple(
            rows(0, 1, dims[0][0]) if dims and dims[0] is not None and dims[0][0] else FREE
            for dims in call.outputs
        ),
        coupled=call.get("scale_grad_by_freq") is True,
    )


def recurrent(call: Call) -> Result:
    """lstm, gru, rnn over a padded batch."""
    x = call.first
    if not _plain(list(call.values())) or "batch_sizes" in call.arguments:
        return mixed(call)
    if not x.flow.batched:
        return same(FREE, call)
    first = bool(call.get("batch_first", False))
    if x.ndim != 3 or x.flow.dim != (0 if first else 1):
        return mixed(call)
    states = [v for v in call.values() if v is not x and v.flow.batched]
    if any(v.flow.dim != 1 or v.flow.layout != x.flow.layout for v in states):
        return mixed(call)
    rest = (x.flow.at(1),) * (len(call.outputs) - 1)
    return Result((x.flow, *rest))


def index(call: Call) -> Result:
    """x[i, j, ...] with tensors of indices."""
    x = call.first
    indices: list[Any] = list(call["indices"])
    indices += [None] * (x.ndim - len(indices))
    given = [(d, value) for d, value in enumerate(indices) if isinstance(value, Value)]
    allowed = (Kind.FREE, Kind.ROWS, Kind.PLACES)
    if any(v.flow.kind not in allowed for _, v in given) or not _plain([x]):
        return mixed(call)
    width = max(value.ndim for _, value in given)
    used = [d for d, _ in given]
    together = used == list(range(used[0], used[0] + len(used)))
    front = used[0] if together else 0
    places = {(v.flow.dim + width - v.ndim, v.flow.layout) for _, v in given if v.flow.batched}
    if x.flow.batched and x.flow.dim not in used:
        if any(v.flow.batched for _, v in given):
            return mixed(call)
        before = sum(d not in used for d in range(x.flow.dim))
        shift = width if before >= front else 0
        return same(x.flow.at(before + shift), call)
    if len(places) > 1:
        return mixed(call)
    if x.flow.batched:
        row = next(v for d, v in given if d == x.flow.dim)
        exact = row.flow.kind is Kind.PLACES and row.flow.step == 1 and row.flow.inner == 1
        if not exact or x.flow.layout != (1, 1):
            return mixed(call)
        others = [v for d, v in given if d != x.flow.dim]
        if any(v.flow.kind is Kind.PLACES for v in others):
            return mixed(call)
        place, _ = places.pop()
        return same(rows(front + place), call)
    if not places:
        return same(FREE, call)
    if any(v.flow.kind is Kind.PLACES for _, v in given):
        return same(MIXED, call)
    place, layout = places.pop()
    return same(rows(front + place, *layout), call)


def index_select(call: Call) -> Result:
    x, dim, index_value = call.first, int(call["dim"]) % max(call.first.ndim, 1), call["index"]
    if not _plain([x, index_value]):
        return mixed(call)
    if x.flow.batched:
        return same(x.flow, call) if dim != x.flow.dim and index_value.flow == FREE else mixed(call)
    if index_value.flow.batched:
        return same(rows(dim, *index_value.flow.layout), call)
    return same(FREE, call)


def gather(call: Call) -> Result:
    """gather, scatter and kin: all tensors have the samples in one and the same place."""
    values = list(call.values())
    if not _plain(values):
        return mixed(call)
    batched = [value.flow for value in values if value.flow.batched]
    if not batched:
        return same(FREE, call)
    ndim = values[0].ndim
    if len({(f.dim, f.layout) for f in batched}) != 1:
        return mixed(call)
    if int(call["dim"]) % ndim == batched[0].dim:
        return mixed(call)
    return same(batched[0], call)


def index_put(call: Call) -> Result:
    """x[i, j] = values: per sample if the samples' dimension is left alone or named in order."""
    x = call.first
    indices: list[Any] = list(call["indices"])
    given = [(d, value) for d, value in enumerate(indices) if isinstance(value, Value)]
    values = call["values"]
    if not _plain([x, values]):
        return mixed(call)
    if not x.flow.batched:
        free = all(v.flow == FREE for _, v in given) and values.flow == FREE
        return same(FREE, call) if free else mixed(call)
    row = next((v for d, v in given if d == x.flow.dim), None)
    if row is None:
        alone = all(v.flow == FREE for _, v in given) or all(v.dtype == "bool" for _, v in given)
        return same(x.flow, call, coupled=not alone)
    if row.dtype == "bool" and row.flow.kind is Kind.ROWS and row.flow.dim == 0:
        # A mask of the samples: exact where the same value goes everywhere.
        return same(x.flow, call, coupled=values.flow != FREE or values.ndim > 0)
    exact = row.flow.kind is Kind.PLACES and row.flow.step == 1 and x.flow.layout == (1, 1)
    return same(x.flow, call, coupled=not exact)


def embedding_like_distance(call: Call) -> Result:
    """cdist(a, b): rows of a against rows of b."""
    a, b = list(call.values())[:2]
    if not _plain([a, b]):
        return mixed(call)
    place_a = a.flow.dim + call.ndim - a.ndim if a.flow.batched else None
    place_b = b.flow.dim + call.ndim - b.ndim if b.flow.batched else None
    if place_a is None and place_b is None:
        return same(FREE, call)
    if place_b is not None and place_b >= call.ndim - 2:
        return mixed(call)
    if place_a is not None and (a.flow.dim == a.ndim - 1):
        return mixed(call)
    both = place_a is not None and place_b is not None
    if both and (place_a != place_b or a.flow.layout != b.flow.layout):
        return mixed(call)
    source = a if place_a is not None else b
    place = place_a if place_a is not None else place_b
    assert place is not None
    return same(rows(place, *source.flow.layout), call)


def coupling(call: Call) -> Result:
    """Ops that mix the samples and give each sample its row back (masked_scatter)."""
    x = call.first
    if x.flow.kind is Kind.ROWS:
        return same(x.flow, call, coupled=True)
    return mixed(call)
