from __future__ import annotations

import pytest

from graphpipe.graph.model_graph import ModelGraph, Op
from graphpipe.plan.modules import modules_of


def graph(*ops: tuple[str, str]) -> ModelGraph:
    return ModelGraph(
        name="tiny", ops=tuple(Op(name=n, target="aten.x", key=n, module=m) for n, m in ops)
    )


TOWERS = graph(
    ("a", "image.layers.0.linear"),
    ("b", "image.layers.0.act"),
    ("c", "image.layers.1.linear"),
    ("d", "text.embed"),
    ("e", "text"),
    ("f", ""),
)


def test_a_whole_module_is_named_once() -> None:
    assert modules_of(TOWERS, ["a", "b", "c"]) == ("image",)


def test_a_cut_module_is_named_by_its_whole_children() -> None:
    assert modules_of(TOWERS, ["c", "d"]) == ("image.layers.1", "text.embed")


def test_ops_of_a_cut_module_itself_are_a_part() -> None:
    assert modules_of(TOWERS, ["e", "f"]) == ("text (part)",)


def test_the_order_is_the_graphs() -> None:
    assert modules_of(TOWERS, ["d", "b"]) == ("image.layers.0.act", "text.embed")


def test_prep_ops_are_not_missed() -> None:
    ops = (
        Op(name="mask", target="aten.ones", key="mask", module="text", prep=True),
        Op(name="body", target="aten.mm", key="body", module="text"),
    )
    assert modules_of(ModelGraph(name="prep", ops=ops), ["body"]) == ("text",)


def test_an_unknown_op_is_an_error() -> None:
    with pytest.raises(KeyError, match="nowhere"):
        modules_of(TOWERS, ["nowhere"])
