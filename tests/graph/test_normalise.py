"""The form that stages are cut from."""

from __future__ import annotations

import torch
from torch import fx

from graphpipe.graph.normalise import Origin, origin_of
from tests.graph.small import small

aten = torch.ops.aten


def _nodes() -> list[fx.Node]:
    _, graph = small()
    assert graph.program is not None
    return list(graph.program.module.graph.nodes)


def test_the_micro_batch_size_comes_first_and_no_op_asks_for_a_size() -> None:
    nodes = _nodes()
    assert (nodes[0].op, nodes[0].name) == ("placeholder", "micro_batch_size")
    assert not any(str(node.target).startswith("aten.sym_size") for node in nodes)


def test_dropout_of_nothing_and_squeeze_of_nothing_are_gone() -> None:
    targets = {node.target for node in _nodes()}
    assert not targets & {aten.dropout.default, aten.squeeze.default, aten.squeeze.dims}


def test_a_region_without_gradients_is_inlined_over_detached_values() -> None:
    nodes = _nodes()
    assert torch.ops.higher_order.wrap_with_set_grad_enabled not in {n.target for n in nodes}
    reduced = next(node for node in nodes if node.target is aten.sum.dim_IntList)
    source = reduced.args[0]
    assert isinstance(source, fx.Node)
    assert source.target is aten.detach.default


def test_every_op_knows_its_module_and_line() -> None:
    origins = [origin_of(n) for n in _nodes() if n.target is aten.linear.default]
    assert [item.module for item in origins] == ["first", "second"]
    assert all("small.py:" in item.source for item in origins)
    assert origin_of(fx.Graph().placeholder("x")) == Origin()
