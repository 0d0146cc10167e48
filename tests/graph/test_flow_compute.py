"""Products, normalisations and look-ups: what is contracted, and with what."""

from __future__ import annotations

import pytest

from graphpipe.graph import flow_compute as compute
from graphpipe.graph.flow import FREE, Flow, Kind, Result, rows, total
from tests.graph.flow_calls import call, free, sizes, tensor

X = tensor(rows(0), "b", 3)
SEQUENCE = tensor(rows(0), "b", 5, 3)
PLACES = tensor(Flow(Kind.PLACES), "b", dtype="int64")
LABELS = tensor(rows(0), "b", dtype="int64")


@pytest.mark.parametrize(
    ("result", "flow"),
    [
        (compute.linear(call("linear", sizes("b", 4), input=X, weight=free(4, 3))), rows(0)),
        (compute.matmul(call("mm", sizes("b", 4), self=X, mat2=free(3, 4))), rows(0)),
        (
            compute.matmul(call("mm", sizes(3, 3), self=tensor(rows(1), 3, "b"), mat2=X)),
            total(),
        ),
        (
            compute.einsum(call("einsum", sizes("b"), equation="bi,bi->b", tensors=[X, X])),
            rows(0),
        ),
        (compute.einsum(call("einsum", (), equation="bi,bi->", tensors=[X, X])), total()),
        (compute.leading(call("conv1d", (), input=SEQUENCE, weight=free(2, 5, 3))), rows(0)),
        (
            compute.layer_norm(call("layer_norm", (), input=X, normalized_shape=[3])),
            rows(0),
        ),
        (
            compute.embedding(call("embedding", (), weight=free(9, 3), indices=LABELS)),
            rows(0),
        ),
        (compute.index(call("index", (), self=X, indices=[PLACES, LABELS])), rows(0)),
        (compute.index(call("index", (), self=free(9, 3), indices=[LABELS])), rows(0)),
        (compute.gather(call("gather", (), self=X, dim=1, index=X)), rows(0)),
        (compute.recurrent(call("gru", (), input=SEQUENCE, batch_first=True)), rows(0)),
        (compute.batch_norm(call("batch_norm", (), input=X, training=False)), rows(0)),
        (compute.matmul(call("mm", (), self=free(2, 3), mat2=free(3, 4))), FREE),
    ],
)
def test_samples_stay_apart_or_are_summed(result: Result, flow: Flow) -> None:
    assert (result.flows[0], result.coupled) == (flow, False)


@pytest.mark.parametrize(
    "result",
    [
        compute.linear(call("linear", sizes("b", "b"), input=X, weight=X)),
        compute.matmul(call("mm", sizes("b", "b"), self=X, mat2=tensor(rows(1), 3, "b"))),
        compute.batch_norm(call("batch_norm", (), input=X, training=True)),
        compute.layer_norm(call("layer_norm", (), input=X, normalized_shape=[2, 3])),
        compute.index(call("index", (), self=X, indices=[LABELS])),
        compute.gather(call("gather", (), self=X, dim=0, index=X)),
        compute.embedding(
            call("embedding", (), weight=free(9, 3), indices=LABELS, scale_grad_by_freq=True)
        ),
        compute.recurrent(call("gru", (), input=SEQUENCE, batch_first=False)),
        compute.einsum(call("einsum", sizes("b", "b"), equation="ai,bi->ab", tensors=[X, X])),
        compute.coupling(call("masked_scatter", sizes("b", 3), self=X)),
    ],
)
def test_what_lets_samples_meet_is_coupled(result: Result) -> None:
    assert result.coupled


def test_attention_mixes_tokens_and_never_samples() -> None:
    heads = tensor(rows(0), "b", 2, 5, 3)
    made = call("scaled_dot_product_attention", heads.dims, query=heads, key=heads, value=heads)
    assert compute.attention(made) == Result((rows(0),))
    tokens = tensor(rows(2), 2, 5, "b", 3)
    over = call("scaled_dot_product_attention", tokens.dims, query=tokens, key=tokens, value=tokens)
    assert compute.attention(over).coupled
