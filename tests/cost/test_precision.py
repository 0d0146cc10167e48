"""What autocast does to dtypes, traffic and saved bytes."""

from __future__ import annotations

import pytest

from graphpipe.cost.analytic import estimate
from graphpipe.cost.precision import run_in
from tests.cost.graphs import mlp


def test_as_captured() -> None:
    graph = mlp()
    for precision, rate in (("fp32", "float32"), ("tf32", "tf32"), ("bf16", "float32")):
        runs = run_in(graph, precision)
        assert {item.rate for item in runs} == {rate}
        assert all(item.scale == 1.0 and item.cast_kernels == 0 for item in runs)


def test_autocast_follows_the_rules_of_amp() -> None:
    graph = mlp()
    runs = dict(zip((op.name for op in graph.ops), run_in(graph, "bf16-mixed"), strict=True))
    rates = {name: item.rate for name, item in runs.items()}
    assert rates == {
        "frozen": "bfloat16",
        "first": "bfloat16",
        "add": "bfloat16",  # both inputs are bfloat16
        "view": "bfloat16",
        "norm": "float32",
        "second": "bfloat16",
        "logits": "bfloat16",
        "loss": "float32",
    }
    assert run_in(graph, "fp16-mixed")[0].rate == "float16"
    # The message from the first linear is half as large, that from the norm as large as before.
    assert runs["first"].output.per_sample == 16.0
    assert runs["norm"].output.per_sample == 32.0


def test_casts_cost_traffic_and_keep_copies() -> None:
    graph = mlp()
    runs = dict(zip((op.name for op in graph.ops), run_in(graph, "bf16-mixed"), strict=True))
    first = runs["first"]
    # x (32 bytes a sample) and the weight (256 bytes) are read in float32, written in bfloat16.
    assert first.cast_kernels == 2
    assert (first.cast_bytes.fixed, first.cast_bytes.per_sample) == (256 + 128, 32 + 16)
    assert first.scale == pytest.approx(0.5)
    # Each keeps a copy of x of its own, and of its weight.
    assert first.saves["x@first"].per_sample == 16.0
    assert first.saves["first.weight"].fixed == 128.0
    assert runs["logits"].saves["x@logits"].per_sample == 16.0
    # The norm reads and keeps what add wrote, which is bfloat16 now.
    assert runs["norm"].saves["add"].per_sample == 16.0
    assert runs["loss"].saves["loss.softmax"].square == pytest.approx(4.0)
    # A frozen linear casts as well, and keeps nothing.
    costs = estimate(graph, "h100-sxm", precision="bf16-mixed")
    assert costs.saved[graph.op_index["frozen"]] == ()
    assert costs.saved_bytes([graph.op_index["first"]]) == (128.0, 16.0)


def test_large_products_gain_from_low_precision() -> None:
    graph = mlp(4096)
    rows = [graph.op_index["first"]]
    times: dict[str, float] = {}
    for precision in ("fp32", "tf32", "bf16-mixed"):
        costs = estimate(graph, "a100-80gb", precision=precision)
        times[precision] = sum(costs.stage_seconds(rows, "a100-80gb", 512))
    assert times["bf16-mixed"] < times["tf32"] < 0.3 * times["fp32"]
