"""What ops are given, found on fake tensors."""

from __future__ import annotations

import pytest
import torch

from graphpipe.cost.profiler.facts import facts_at, program_of
from graphpipe.errors import CostError
from graphpipe.graph.model_graph import ModelGraph
from tests.cost.profiler.model import WIDTH, hard_graph


def test_shapes_are_those_of_the_graph_at_every_size() -> None:
    graph = hard_graph()
    for size in (1, 2, 9):
        facts = facts_at(graph, size)
        assert set(facts) == {op.name for op in graph.ops}
        for op in graph.ops:
            if op.output is not None:
                found = facts[op.name].outputs[0]
                assert found.shape == op.output.concrete_shape(size)
                assert str(found.dtype) == f"torch.{op.output.dtype}"
                assert found.requires_grad == op.output.requires_grad


def test_strides_aliases_and_parameters_are_seen() -> None:
    graph = hard_graph()
    facts = facts_at(graph, 3)
    by_target = {op.target: op.name for op in graph.ops}
    linear = next(op.name for op in graph.ops if op.module == "qkv")
    source, weight, bias = facts[linear].tensors
    assert source.stride == (5 * WIDTH, 1, 5)  # transposed
    assert (weight.state, bias.state) == ("qkv.weight", "qkv.bias")
    assert weight.requires_grad
    attention = facts[by_target["aten.scaled_dot_product_attention.default"]].tensors
    # The three parts of one linear lie in its memory.
    assert {item.root for item in attention} == {linear}
    assert {item.root_bytes for item in attention} == {3 * 5 * 3 * WIDTH * 4}
    assert len({item.name for item in attention}) == 3
    relu = facts[by_target["aten.relu_.default"]]
    assert relu.outputs[0].root == by_target["aten.batch_norm.default"]


def test_views_are_told_from_ops_that_read_or_write() -> None:
    graph = hard_graph()
    facts = facts_at(graph, 3)
    views = {op.target for op in graph.ops if facts[op.name].is_view}
    assert "aten.transpose.int" in views
    assert "aten.relu_.default" not in views  # the same memory, changed
    assert not any("linear" in target or "conv" in target for target in views)


def test_equal_work_has_equal_signatures() -> None:
    graph = hard_graph()
    facts = facts_at(graph, 3)
    first, second = (op.name for op in graph.ops if op.module.startswith("twins."))
    assert facts[first].signature == facts[second].signature
    frozen = next(op.name for op in graph.ops if op.module == "frozen")
    assert facts[first].signature != facts[frozen].signature
    assert facts[first].signature != facts_at(graph, 4)[first].signature


def test_nothing_is_computed_and_the_model_is_untouched() -> None:
    graph = hard_graph()
    state = {name: value.clone() for name, value in program_of(graph).state.items()}
    facts_at(graph, 2)
    for name, value in program_of(graph).state.items():
        assert torch.equal(value, state[name])


def test_a_graph_from_a_file_cannot_be_profiled() -> None:
    again = ModelGraph.from_json(hard_graph().to_json())
    with pytest.raises(CostError, match="read from a file"):
        facts_at(again, 2)
