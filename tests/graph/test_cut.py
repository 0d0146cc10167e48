"""The boundary of a set of ops."""

from __future__ import annotations

import pytest

from graphpipe.errors import GraphError
from graphpipe.graph.cut import partition_ops, sink_ops, stage_cut
from graphpipe.graph.model_graph import (
    GraphInput,
    LossTerm,
    ModelGraph,
    Op,
    Parameter,
    TensorSpec,
)

ROWS = TensorSpec(shape=("b", 4), dtype="float32")


def op(name: str, *inputs: str, prep: bool = False, parameters: tuple[str, ...] = ()) -> Op:
    return Op(
        name=name,
        target="aten.op",
        key=name,
        inputs=inputs,
        prep=prep,
        parameters=parameters,
        output=ROWS,
    )


@pytest.fixture
def diamond() -> ModelGraph:
    """x -> stem -> (a, b) -> head; both branches read a mask made by two prep ops."""
    return ModelGraph(
        name="diamond",
        inputs=(
            GraphInput(name="x", path="args[0]", spec=ROWS),
            GraphInput(name="mask", path="args[1]", spec=ROWS),
        ),
        parameters=tuple(Parameter(name=n, shape=(4,), dtype="float32") for n in ("w", "table")),
        ops=(
            op("not_mask", "mask", prep=True),
            op("bias", "not_mask", prep=True, parameters=("table",)),
            op("stem", "x", parameters=("w",)),
            op("a", "stem", "bias"),
            op("b", "stem", "bias", parameters=("w",)),
            op("head", "a", "b"),
            op("count", "mask"),
        ),
        loss_terms=(LossTerm(op="head", reduction="sum_count", count_op="count"),),
        outputs=("a",),
    )


def test_prep_ops_are_not_partitioned(diamond: ModelGraph) -> None:
    assert partition_ops(diamond) == ("stem", "a", "b", "head", "count")


def test_every_reader_of_a_prep_op_gets_it_with_all_that_it_needs(diamond: ModelGraph) -> None:
    for name, parameters in (("a", ("table",)), ("b", ("w", "table"))):
        cut = stage_cut(diamond, [name])
        assert cut.prep == ("not_mask", "bias")
        assert cut.inputs == ("mask",)
        assert cut.reads == ("stem",)
        assert cut.writes == (name,)
        assert cut.parameters == parameters


def test_a_value_is_written_only_if_read_outside(diamond: ModelGraph) -> None:
    assert stage_cut(diamond, ["stem", "a"]).writes == ("stem", "a")
    assert stage_cut(diamond, ["stem", "a", "b", "head"]).writes == ()


def test_sinks_are_loss_terms_counts_and_outputs(diamond: ModelGraph) -> None:
    assert sink_ops(diamond) == {"head", "count", "a"}
    assert stage_cut(diamond, ["head", "count"]).sinks == ("head", "count")
    assert stage_cut(diamond, ["b"]).sinks == ()


def test_prep_ops_in_the_list_change_nothing(diamond: ModelGraph) -> None:
    assert stage_cut(diamond, ["bias", "a"]) == stage_cut(diamond, ["a"])


def test_an_unknown_op_is_named(diamond: ModelGraph) -> None:
    with pytest.raises(GraphError, match="'nonsense'"):
        stage_cut(diamond, ["a", "nonsense"])
