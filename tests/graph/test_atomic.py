"""Ops that stay together, and ops that every reader prepares for itself."""

from __future__ import annotations

import operator

import torch
from torch import fx

from graphpipe.graph.atomic import groups, prep_ops
from tests.graph.graphs import Built, aten, build


def _ops(built: Built) -> list[fx.Node]:
    return [node for node in built.graph.nodes if node.op == "call_function"]


def _grouped(built: Built) -> list[set[str]]:
    found: dict[int, set[str]] = {}
    for node, number in groups(_ops(built), built.run).items():
        found.setdefault(number, set()).add(node.name)
    return list(found.values())


def test_a_tuple_keeps_its_items() -> None:
    def make(graph: fx.Graph, batch: fx.Node, x: fx.Node) -> fx.Node:
        pair = graph.call_function(aten.topk.default, (x, 1))
        item = graph.call_function(operator.getitem, (pair, 0))
        return graph.call_function(aten.tanh.default, (item,))

    assert _grouped(build(make, [("b", 3)])) == [{"topk_default", "getitem"}]


def test_what_is_written_to_keeps_writer_views_and_earlier_readers() -> None:
    def make(graph: fx.Graph, batch: fx.Node, x: fx.Node) -> fx.Node:
        made = graph.call_function(aten.tanh.default, (x,))
        graph.call_function(aten.exp.default, (made,))
        written = graph.call_function(aten.mul_.Tensor, (made, x))
        return graph.call_function(aten.sin.default, (written,))

    assert _grouped(build(make, [("b", 3)])) == [{"tanh_default", "exp_default", "mul__tensor"}]


def test_masks_are_prepared_anew_and_layers_and_sinks_are_not() -> None:
    def make(graph: fx.Graph, batch: fx.Node, x: fx.Node, w: fx.Node) -> fx.Node:
        mask = graph.call_function(aten.gt.Scalar, (x, 0.0))
        layer = graph.call_function(aten.linear.default, (x, w))
        return graph.call_function(aten.mul.Tensor, (layer, mask))

    weight = torch.nn.Parameter(torch.ones(3, 3))
    built = build(make, [("b", 3)], state={"w": weight})
    ops = _ops(built)

    def prepared(**options: object) -> set[str]:
        chosen = {"sinks": set(), "is_random": lambda node: False, **options}
        found = prep_ops(
            ops,
            built.run,
            built.flow,
            {},
            {"w"},
            {},
            chosen["sinks"],  # type: ignore[arg-type]
            chosen["is_random"],  # type: ignore[arg-type]
        )
        return {node.name for node in found}

    assert prepared() == {"gt_scalar"}
    assert prepared(sinks={ops[0]}) == set()
    assert prepared(is_random=lambda node: True) == set()
