"""Every rule of the data flow is true of what the op computes.

Each case is run on numbers for four samples and for pieces of them; what the rule says
about rows, sums and means must hold. Ops that mix samples must be found out.
"""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from graphpipe.graph.dataflow import Declared
from graphpipe.graph.flow import FREE, Flow, Kind, rows, total
from tests.graph.graphs import IN, B, Built, aten, build, op, sized

X, Y, Z = IN(0), IN(1), IN(2)
F32, I64, BOOL = torch.float32, torch.int64, torch.bool


def case(name: str, make: Any, shapes: list[Any], flow: Flow, **options: Any) -> Any:
    return pytest.param(make, shapes, flow, options, id=name)


PER_SAMPLE = [
    case("add", op(aten.add.Tensor, X, Y), [("b", 3), ("b", 3)], rows(0)),
    case("add broadcast", op(aten.add.Tensor, X, Y), [("b", 3), (3,)], rows(0)),
    case("mul column", op(aten.mul.Tensor, X, Y), [("b", 3), ("b", 1)], rows(0)),
    case("where", op(aten.where.self, X, Y, Z), [("b", 3)] * 3, rows(0), dtypes=[BOOL, F32, F32]),
    case("masked_fill", op(aten.masked_fill.Scalar, X, Y, 0.0), [("b", 3)] * 2, rows(0),
         dtypes=[F32, BOOL]),
    case("to", op(aten.to.dtype, X, torch.float64), [("b", 3)], rows(0)),
    case("view merges", op(aten.view.default, X, [-1, 4]), [("b", 3, 4)], rows(0, 1, 3)),
    case("view splits", op(aten.view.default, X, [B, 2, 3]), [("b", 6)], rows(0)),
    case("rows split", op(aten.view.default, X, [B, 8, 3]), [("8b", 3)], rows(0)),
    case("transpose", op(aten.transpose.int, X, 0, 1), [("b", 3)], rows(1)),
    case("permute", op(aten.permute.default, X, [2, 0, 1]), [("b", 3, 4)], rows(1)),
    case("unsqueeze", op(aten.unsqueeze.default, X, 0), [("b", 3)], rows(1)),
    case("squeeze", op(aten.squeeze.dims, X, [1]), [("b", 1, 3)], rows(0)),
    case("expand", op(aten.expand.default, X, [2, -1, -1]), [("b", 3)], rows(1)),
    case("repeat inside", op(aten.repeat.default, X, [1, 2]), [("b", 3)], rows(0)),
    case("repeat rows", op(aten.repeat.default, X, [2, 1]), [("b", 3)], rows(0, 2)),
    case("interleave rows", op(aten.repeat_interleave.self_int, X, 2, 0), [("b", 3)],
         rows(0, 1, 2)),
    case("cat features", op(aten.cat.default, [X, Y], 1), [("b", 3), ("b", 2)], rows(0)),
    case("cat batches", op(aten.cat.default, [X, Y]), [("b", 3), ("b", 3)], rows(0, 2)),
    case("stack", op(aten.stack.default, [X, Y]), [("b", 3), ("b", 3)], rows(1)),
    case("slice", op(aten.slice.Tensor, X, 1, 1, 3), [("b", 4)], rows(0)),
    case("select", op(aten.select.int, X, 1, 1), [("b", 4, 2)], rows(0)),
    case("diagonal", op(aten.diagonal.default, X, 0, 1, 2), [("b", 3, 3)], rows(0)),
    case("tril", op(aten.tril.default, X), [("b", 3, 3)], rows(0)),
    case("pad", op(aten.pad.default, X, [1, 1]), [("b", 3)], rows(0)),
    case("flip", op(aten.flip.default, X, [1]), [("b", 3)], rows(0)),
    case("one_hot", op(aten.one_hot.default, X, 5), [("b", 3)], rows(0), dtypes=[I64]),
    case("softmax", op(aten.softmax.int, X, -1), [("b", 3)], rows(0)),
    case("cumsum", op(aten.cumsum.default, X, 1), [("b", 3)], rows(0)),
    case("diff", op(aten.diff.default, X, 1, -1), [("b", 3)], rows(0)),
    case("sum features", op(aten.sum.dim_IntList, X, [1]), [("b", 3)], rows(0)),
    case("mean keepdim", op(aten.mean.dim, X, [-1], True), [("b", 3)], rows(0)),
    case("amax", op(aten.amax.default, X, [1]), [("b", 3)], rows(0)),
    case("argmax", op(aten.argmax.default, X, 1), [("b", 3)], rows(0)),
    case("var", op(aten.var.correction, X, [1]), [("b", 3)], rows(0)),
    case("norm", op(aten.linalg_vector_norm.default, X, 2.0, [-1], True), [("b", 3)], rows(0)),
    case("linear", op(aten.linear.default, X, Y), [("b", 3), (4, 3)], rows(0)),
    case("matmul right free", op(aten.matmul.default, X, Y), [("b", 2, 3), (3, 4)], rows(0)),
    case("matmul left free", op(aten.matmul.default, Y, X), [("b", 3, 2), (4, 3)], rows(0)),
    case("matmul both", op(aten.matmul.default, X, Y), [("b", 2, 3), ("b", 3, 4)], rows(0)),
    case("matmul vector", op(aten.matmul.default, X, Y), [("b", 3), (3,)], rows(0)),
    case("bmm", op(aten.bmm.default, X, Y), [("b", 2, 3), ("b", 3, 2)], rows(0)),
    case("addmm", op(aten.addmm.default, Y, X, Z), [("b", 3), (4,), (3, 4)], rows(0)),
    case("einsum", op(aten.einsum.default, "bij,bjk->bik", [X, Y]), [("b", 2, 3), ("b", 3, 2)],
         rows(0)),
    case("conv2d", op(aten.conv2d.default, X, Y), [("b", 2, 4, 4), (3, 2, 3, 3)], rows(0)),
    case("max_pool2d", op(aten.max_pool2d.default, X, [2, 2]), [("b", 2, 4, 4)], rows(0)),
    case("adaptive pool", op(aten.adaptive_avg_pool2d.default, X, [1, 1]), [("b", 2, 4, 4)],
         rows(0)),
    case("upsample", op(aten.upsample_nearest2d.vec, X, None, [2.0, 2.0]), [("b", 2, 2, 2)],
         rows(0)),
    case("layer_norm", op(aten.layer_norm.default, X, [3]), [("b", 2, 3)], rows(0)),
    case("group_norm", op(aten.group_norm.default, X, 2), [("b", 4, 3)], rows(0)),
    case("batch_norm eval",
         op(aten.batch_norm.default, X, None, None, Y, Z, False, 0.1, 1e-5, False),
         [("b", 3), (3,), (3,)], rows(0), positive=True),
    case("embedding", op(aten.embedding.default, Y, X), [("b", 3), (5, 4)], rows(0),
         dtypes=[I64, F32]),
    case("attention", op(aten.scaled_dot_product_attention.default, X, Y, Z),
         [("b", 2, 3, 4)] * 3, rows(0)),
    case("gather", op(aten.gather.default, X, 1, Y), [("b", 3), ("b", 2)], rows(0),
         dtypes=[F32, I64]),
    case("scatter_add", op(aten.scatter_add.default, X, 1, Y, Z), [("b", 3), ("b", 2), ("b", 2)],
         rows(0), dtypes=[F32, I64, F32]),
    case("index table", op(aten.index.Tensor, Y, [X]), [("b", 3), (5, 4)], rows(0),
         dtypes=[I64, F32]),
    case("index columns", op(aten.index.Tensor, X, [None, Y]), [("b", 5), (3,)], rows(0),
         dtypes=[F32, I64]),
    case("index_select", op(aten.index_select.default, X, 1, Y), [("b", 5), (3,)], rows(0),
         dtypes=[F32, I64]),
    case("cross_entropy rows", op(aten.cross_entropy_loss.default, X, Y, None, 0),
         [("b", 5), ("b",)], rows(0), dtypes=[F32, I64]),
    case("cosine", op(aten.cosine_similarity.default, X, Y), [("b", 3), ("b", 3)], rows(0)),
    case("cdist", op(aten.cdist.default, X, Y), [("b", 2, 3), ("b", 4, 3)], rows(0)),
    case("zeros_like", op(aten.zeros_like.default, X), [("b", 3)], rows(0)),
    case("copy_", op(aten.copy_.default, X, Y), [("b", 3), ("b", 3)], rows(0)),
]  # fmt: skip

LINEAR = [
    case("sum", op(aten.sum.default, X), [("b", 3)], total()),
    case("sum dim 0", op(aten.sum.dim_IntList, X, [0]), [("b", 3)], total()),
    case("mean", op(aten.mean.default, X), [("b", 3)], total(-1)),
    case("mean dim 0", op(aten.mean.dim, X, [0]), [("b", 3)], total(-1)),
    case("mse mean", op(aten.mse_loss.default, X, Y), [("b", 3), ("b", 3)], total(-1)),
    case("l1 sum", op(aten.l1_loss.default, X, Y, 2), [("b", 3), ("b", 3)], total()),
    case("cross_entropy", op(aten.cross_entropy_loss.default, X, Y), [("b", 5), ("b",)],
         total(-1), dtypes=[F32, I64]),
    case("cross_entropy sum", op(aten.cross_entropy_loss.default, X, Y, None, 2),
         [("b", 5), ("b",)], total(), dtypes=[F32, I64]),
    case("bce", op(aten.binary_cross_entropy_with_logits.default, X, Y), [("b", 3), ("b", 3)],
         total(-1)),
    case("covariance", op(aten.matmul.default, Y, X), [("b", 3), ("b", 3)], total(),
         transposed=1),
    case("count", op(aten.sum.default, X), [("b", 3)], total(), dtypes=[BOOL]),
]  # fmt: skip

COUPLED = [
    case("similarity", op(aten.matmul.default, X, Y), [("b", 3), ("b", 3)], FREE, transposed=1),
    case("softmax over samples", op(aten.softmax.int, X, 0), [("b", 3)], FREE),
    case("max over samples", op(aten.amax.default, X, [0]), [("b", 3)], FREE),
    case("std", op(aten.std.correction, X, [0]), [("b", 3)], FREE),
    case("flip", op(aten.flip.default, X, [0]), [("b", 3)], FREE),
    case("roll", op(aten.roll.default, X, [1], [0]), [("b", 3)], FREE),
    case("sort", op(aten.sort.default, X, 0), [("b", 3)], FREE),
    case("cumsum", op(aten.cumsum.default, X, 0), [("b", 3)], FREE),
    case("one sample", op(aten.select.int, X, 0, 0), [("b", 3)], FREE),
    case("first samples", op(aten.slice.Tensor, X, 0, 0, 1), [("b", 3)], FREE),
    case("batch_norm", op(aten.batch_norm.default, X, None, None, None, None, True, 0.1, 1e-5,
                          False), [("b", 3)], FREE),
    case("masked_scatter", op(aten.masked_scatter.default, X, Y, Z), [("b", 3)] * 3, FREE,
         dtypes=[F32, BOOL, F32]),
    case("column against row", op(aten.mse_loss.default, X, Y), [("b", 1), ("b",)], FREE),
    case("gather over samples", op(aten.gather.default, X, 0, Y), [("b", 3), ("b", 3)], FREE,
         dtypes=[F32, I64]),
    case("index samples", op(aten.index.Tensor, X, [Y]), [("b", 3), ("b",)], FREE,
         dtypes=[F32, I64]),
    case("histogram", op(aten.histc.default, X), [("b", 3)], FREE),
    case("triu of the batch", op(aten.triu.default, X), [("b", 3)], FREE),
]  # fmt: skip


def numbers(shapes: list[Any], options: dict[str, Any], n: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    dtypes = options.get("dtypes") or [F32] * len(shapes)
    made = []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        size = sized(shape, n)
        if dtype is BOOL:
            made.append(torch.rand(size, generator=generator) > 0.4)
        elif dtype is I64:
            made.append(torch.randint(0, 2, size, generator=generator))
        else:
            values = torch.randn(size, generator=generator)
            made.append(values.abs() if options.get("positive") else values)
    return made


def built(make: Any, shapes: list[Any], options: dict[str, Any]) -> Built:
    turned = options.get("transposed")
    if turned is not None:
        plain = make

        def make(graph: fx.Graph, batch: fx.Node, *inputs: fx.Node) -> fx.Node:
            items = list(inputs)
            items[turned] = graph.call_function(aten.t.default, (items[turned],))
            return plain(graph, batch, *items)

    return build(make, shapes, options.get("dtypes"))


def piece(tensors: list[torch.Tensor], shapes: list[Any], low: int, high: int) -> list[Any]:
    result = []
    for tensor, shape in zip(tensors, shapes, strict=True):
        if shape and isinstance(shape[0], str):
            count = int(shape[0][:-1] or 1)
            result.append(tensor[low * count : high * count].clone())
        else:
            result.append(tensor.clone())
    return result


def run(graph: Built, n: int, tensors: list[Any]) -> torch.Tensor:
    value = graph.module(n, *tensors)
    return value[0] if isinstance(value, (tuple, list)) else value


def samples_of(value: torch.Tensor, flow: Flow, n: int, low: int, high: int) -> torch.Tensor:
    """The part of a value that belongs to some of its samples."""
    shape = list(value.shape)
    shape[flow.dim : flow.dim + 1] = [flow.outer, n, flow.inner]
    return value.reshape(shape).narrow(flow.dim + 1, low, high - low)


@pytest.mark.parametrize(("make", "shapes", "flow", "options"), PER_SAMPLE)
def test_rows_depend_on_their_own_sample(
    make: Any, shapes: list[Any], flow: Flow, options: dict[str, Any]
) -> None:
    graph = built(make, shapes, options)
    assert graph.flow.flows[graph.output] == flow
    assert not graph.flow.coupled
    assert not graph.flow.unknown
    whole = numbers(shapes, options, 4)
    value = run(graph, 4, piece(whole, shapes, 0, 4))
    for low, high in ((0, 2), (2, 4), (1, 2)):
        part = run(graph, high - low, piece(whole, shapes, low, high))
        expected = samples_of(value, flow, 4, low, high)
        got = samples_of(part, flow, high - low, 0, high - low)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("make", "shapes", "flow", "options"), LINEAR)
def test_sums_add_and_means_average(
    make: Any, shapes: list[Any], flow: Flow, options: dict[str, Any]
) -> None:
    graph = built(make, shapes, options)
    assert graph.flow.flows[graph.output] == flow
    assert not graph.flow.coupled
    whole = numbers(shapes, options, 4)
    value = run(graph, 4, piece(whole, shapes, 0, 4))
    first = run(graph, 1, piece(whole, shapes, 0, 1))
    rest = run(graph, 3, piece(whole, shapes, 1, 4))
    expected = first + rest if flow.power == 0 else (first + 3 * rest) / 4
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize(("make", "shapes", "flow", "options"), COUPLED)
def test_ops_that_mix_samples_are_found(
    make: Any, shapes: list[Any], flow: Flow, options: dict[str, Any]
) -> None:
    graph = built(make, shapes, options)
    assert graph.output in graph.flow.coupled
    assert not graph.flow.unknown


def test_an_unknown_op_counts_as_mixing() -> None:
    graph = build(op(aten.logcumsumexp.default, X, 0), [("b", 3)])
    assert graph.output in graph.flow.coupled
    odd = build(op(aten.linalg_inv.default, X), [("b", 3, 3)])
    assert odd.output in odd.flow.unknown
    assert odd.output in odd.flow.coupled


def test_a_sum_divided_by_the_batch_is_a_mean() -> None:
    def make(graph: fx.Graph, batch: fx.Node, x: fx.Node) -> fx.Node:
        rows_in_all = graph.call_function(operator.mul, (batch, 3))
        summed = graph.call_function(aten.sum.default, (x,))
        return graph.call_function(aten.div.Tensor, (summed, rows_in_all))

    graph = build(make, [("b", 3)])
    assert graph.flow.flows[graph.output] == total(-1)


def test_centring_by_the_batch_mean_is_coupled_and_its_rows_are_rows_again() -> None:
    def make(graph: fx.Graph, batch: fx.Node, x: fx.Node) -> fx.Node:
        mean = graph.call_function(aten.mean.dim, (x, [0]))
        return graph.call_function(aten.sub.Tensor, (x, mean))

    graph = build(make, [("b", 3)])
    assert graph.flow.coupled == {graph.output}
    assert graph.flow.flows[graph.output] == rows(0)


@pytest.mark.parametrize("root", [aten.sqrt.default, aten.exp.default, aten.square.default])
def test_a_nonlinear_function_of_a_mean_is_coupled(root: Any) -> None:
    def make(graph: fx.Graph, batch: fx.Node, x: fx.Node, y: fx.Node) -> fx.Node:
        loss = graph.call_function(aten.mse_loss.default, (x, y))
        return graph.call_function(root, (loss,))

    graph = build(make, [("b", 3), ("b", 3)])
    assert graph.output in graph.flow.coupled


def test_a_dice_loss_is_coupled() -> None:
    def make(graph: fx.Graph, batch: fx.Node, x: fx.Node, y: fx.Node) -> fx.Node:
        both = graph.call_function(aten.mul.Tensor, (x, y))
        top = graph.call_function(aten.sum.default, (both,))
        left = graph.call_function(aten.sum.default, (x,))
        right = graph.call_function(aten.sum.default, (y,))
        bottom = graph.call_function(aten.add.Tensor, (left, right))
        return graph.call_function(aten.div.Tensor, (top, bottom))

    graph = build(make, [("b", 3), ("b", 3)])
    assert graph.output in graph.flow.coupled


def test_picking_one_token_of_every_sample_is_per_sample() -> None:
    def make(graph: fx.Graph, batch: fx.Node, x: fx.Node, last: fx.Node) -> fx.Node:
        every = graph.call_function(aten.arange.default, (batch,))
        return graph.call_function(aten.index.Tensor, (x, [every, last]))

    graph = build(make, [("b", 5, 3), ("b",)], [F32, I64])
    assert graph.flow.flows[graph.output] == rows(0)
    assert not graph.flow.coupled


def test_labels_by_place_in_the_batch_are_coupled() -> None:
    def make(graph: fx.Graph, batch: fx.Node, x: fx.Node) -> fx.Node:
        labels = graph.call_function(aten.arange.default, (batch,))
        return graph.call_function(aten.cross_entropy_loss.default, (x, labels))

    graph = build(make, [("b", 8)])
    assert graph.output in graph.flow.coupled


def test_bags_of_a_fixed_size_are_per_sample() -> None:
    def make(graph: fx.Graph, batch: fx.Node, x: fx.Node, table: fx.Node) -> fx.Node:
        flat = graph.call_function(aten.reshape.default, (x, [-1]))
        end = graph.call_function(operator.mul, (batch, 4))
        offsets = graph.call_function(aten.arange.start_step, (0, end, 4))
        bag = graph.call_function(
            aten.embedding_bag.padding_idx,
            (table, flat, offsets, False, 0, False, None, False, None),
        )
        return graph.call_function(operator.getitem, (bag, 0))  # fmt: skip

    graph = build(make, [("b", 4)], [I64], {"table": torch.randn(9, 3)})
    assert graph.flow.flows[graph.output] == rows(0)
    assert not graph.flow.coupled


def test_concatenated_batches_can_be_taken_apart_again() -> None:
    def make(graph: fx.Graph, batch: fx.Node, x: fx.Node, y: fx.Node) -> fx.Node:
        both = graph.call_function(aten.cat.default, ([x, y],))
        halves = graph.call_function(aten.chunk.default, (both, 2))
        return graph.call_function(operator.getitem, (halves, 1))

    graph = build(make, [("b", 3), ("b", 3)])
    assert graph.flow.flows[graph.output] == rows(0)


def test_what_is_written_in_place_holds_for_every_view() -> None:
    def make(graph: fx.Graph, batch: fx.Node, x: fx.Node) -> fx.Node:
        buffer = graph.call_function(aten.zeros_like.default, (x,))
        column = graph.call_function(aten.select.int, (buffer, 1, 0))
        other = graph.call_function(aten.select.int, (x, 1, 1))
        reverse = graph.call_function(aten.flip.default, (other, [0]))
        graph.call_function(aten.copy_.default, (column, reverse))
        return graph.call_function(aten.neg.default, (buffer,))

    graph = build(make, [("b", 3)])
    assert graph.output in graph.flow.coupled
    assert graph.flow.flows[graph.output].kind is Kind.MIXED


def test_a_declared_op_is_per_sample_and_unused_names_are_known() -> None:
    declared = Declared(["aten.masked_scatter.default", "nowhere.*"])
    graph = build(
        op(aten.masked_scatter.default, X, Y, Z),
        [("b", 3)] * 3,
        [F32, BOOL, F32],
        declared=declared,
    )
    assert graph.flow.flows[graph.output] == rows(0)
    assert not graph.flow.coupled
    assert declared.unused == ("nowhere.*",)
