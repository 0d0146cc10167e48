"""Runs on fake tensors: shapes, storages, gradients, what is kept."""

from __future__ import annotations

import operator

import torch
from torch import fx

from graphpipe.graph.fake_run import FakeRun, Observation, TensorShape, fake_run

aten = torch.ops.aten


def _run(graph: fx.Graph, samples: int = 2, *, gradients: bool = True) -> dict[str, Observation]:
    return {n.name: seen for n, seen in _whole(graph, samples, gradients).nodes.items()}


def _whole(graph: fx.Graph, samples: int, gradients: bool) -> FakeRun:
    return fake_run(
        graph,
        samples,
        {"w": TensorShape((4, 3), (3, 1), torch.float32, True)},
        {"x": TensorShape((samples, 3), (3, 1), torch.float32)},
        gradients=gradients,
        cache={},
    )


def _graph() -> tuple[fx.Graph, fx.Node, fx.Node]:
    graph = fx.Graph()
    graph.placeholder("micro_batch_size")
    return graph, graph.placeholder("x"), graph.create_node("get_attr", "w")


def test_shapes_gradients_and_work_follow_the_samples() -> None:
    graph, x, w = _graph()
    y = graph.call_function(aten.linear.default, (x, w))
    for samples in (2, 5):
        seen = _run(graph, samples)
        assert seen["micro_batch_size"].number == samples
        assert seen[y.name].values[0].shape == (samples, 4)
        assert seen[y.name].forward.flops == 2 * samples * 3 * 4
        assert [seen[n].values[0].requires_grad for n in ("x", "w", y.name)] == [False, True, True]
    assert not _run(graph, gradients=False)[y.name].values[0].requires_grad


def test_views_share_a_storage_and_tuples_keep_their_places() -> None:
    graph, x, _ = _graph()
    view = graph.call_function(aten.view.default, (x, [-1]))
    pair = graph.call_function(aten.topk.default, (x, 1))
    item = graph.call_function(operator.getitem, (pair, 1))
    seen = _run(graph)
    assert seen[view.name].values[0].storage == seen["x"].values[0].storage
    assert (seen[pair.name].is_tuple, seen[pair.name].positions) == (True, (0, 1))
    assert seen[item.name].values == (seen[pair.name].values[1],)


def test_what_a_backward_needs_is_kept_but_for_parameters() -> None:
    graph, x, w = _graph()
    y = graph.call_function(aten.linear.default, (x, w))
    z = graph.call_function(aten.tanh.default, (y,))
    seen = _run(graph)
    assert dict(seen[y.name].saves) == {"x": 2 * 3 * 4}
    assert dict(seen[z.name].saves) == {z.name: 2 * 4 * 4}
    assert _run(graph, gradients=False)[z.name].saves == ()


def test_an_op_in_place_makes_earlier_views_need_a_gradient() -> None:
    graph, x, w = _graph()
    empty = graph.call_function(aten.zeros.default, ([2, 4],))
    view = graph.call_function(aten.view.default, (empty, [8]))
    y = graph.call_function(aten.linear.default, (x, w))
    written = graph.call_function(aten.copy_.default, (empty, y))
    seen = _run(graph)
    assert seen[written.name].mutates == {seen[empty.name].values[0].storage}
    assert seen[view.name].values[0].requires_grad
