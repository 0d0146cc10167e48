"""Edges and inputs follow from the graph and the stages' ops alone."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from graphpipe.errors import PlanError
from graphpipe.graph.model_graph import LossTerm, ModelGraph, TensorSpec
from graphpipe.plan.edges import cuts_of, gradient_ops, input_signatures, stage_edges
from tests.plan.graphs import costs_of, tensor, two_towers


class Ops(NamedTuple):
    ops: tuple[str, ...]


TOWERS = [Ops(("i1", "i2")), Ops(("t1", "t2")), Ops(("join", "loss"))]


def test_edges_carry_what_crosses_and_nothing_else() -> None:
    edges = stage_edges(two_towers(), TOWERS)
    assert [(e.source, e.target, [t.name for t in e.tensors]) for e in edges] == [
        (0, 2, ["i2"]),
        (1, 2, ["t2"]),
    ]
    (i2,) = edges[0].tensors
    assert (i2.shape, i2.dtype, i2.rows_per_sample, i2.has_gradient) == ((1, 4), "float32", 1, True)
    assert (i2.bytes_per_sample, i2.fixed_bytes, i2.gradient_bytes_per_sample) == (16, 0, 16)


def test_bytes_come_from_the_costs_where_given() -> None:
    graph = two_towers()
    costs = costs_of(graph)
    costs.output_bytes[graph.op_index["i2"]] = (3.0, 7.0)
    (i2,) = stage_edges(graph, TOWERS, costs)[0].tensors
    assert (i2.fixed_bytes, i2.bytes_per_sample, i2.gradient_bytes_per_sample) == (3, 7, 16)


def test_prep_ops_make_no_edge() -> None:
    split = [Ops(("i1", "i2", "t1")), Ops(("t2",)), Ops(("join", "loss"))]
    names = {t.name for e in stage_edges(two_towers(), split) for t in e.tensors}
    assert names == {"t1", "i2", "t2"}


def test_a_reader_that_is_not_differentiable_returns_no_gradient() -> None:
    graph = two_towers(t2={"requires_grad": False, "output": tensor(4, gradient=False)})
    split = [Ops(("t1",)), Ops(("t2", "i1")), Ops(("i2", "join", "loss"))]
    gradient = {t.name: t.has_gradient for e in stage_edges(graph, split) for t in e.tensors}
    assert gradient == {"t1": False, "t2": False, "i1": True}
    assert {t.name: t.gradient_bytes_per_sample for e in stage_edges(graph, split)
            for t in e.tensors}["t1"] == 0  # fmt: skip


def test_a_tensor_without_batch_dimension_has_fixed_bytes() -> None:
    graph = two_towers(t2={"output": TensorSpec(shape=(5, 2), dtype="float32", requires_grad=True)})
    (t2,) = stage_edges(graph, TOWERS)[1].tensors
    assert (t2.rows_per_sample, t2.fixed_bytes, t2.bytes_per_sample) == (None, 40, 0)


def test_several_rows_a_sample() -> None:
    (i2,) = stage_edges(two_towers(i2={"output": tensor(4, rows="8*b")}), TOWERS)[0].tensors
    assert (i2.rows_per_sample, i2.shape, i2.bytes_per_sample) == (8, (8, 4), 128)


def test_ops_that_the_loss_does_not_depend_on_have_no_backward() -> None:
    graph = two_towers()
    assert gradient_ops(graph) == {"i1", "i2", "t1", "t2", "join", "loss"}
    other = ModelGraph(**{**dict(graph), "loss_terms": (LossTerm(op="t2", reduction="sum"),)})
    assert gradient_ops(other) == {"t1", "t2"}
    free = ModelGraph(**{**dict(graph), "loss_terms": ()})
    assert gradient_ops(free) == {"i1", "i2", "t1", "t2", "join", "loss"}


def test_inputs_go_to_every_stage_that_reads_them() -> None:
    graph = two_towers()
    found = {item.name: item.stages for item in input_signatures(graph, cuts_of(graph, TOWERS))}
    assert found == {"image": (0,), "text": (1,), "label": (2,)}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([Ops(("i1", "i2")), Ops(("join", "loss"))], r"in no stage \(at 't1', 't2'\)"),
        (
            [*TOWERS, Ops(("t2",))],
            r"more than one stage.*\(at 't2' in stages 1, 3\)",
        ),
        ([Ops(("i1", "i1", "i2")), *TOWERS[1:]], r"'i1' in stages 0, 0"),
        ([*TOWERS, Ops(("ghost",))], r"does not have \(at 'ghost' in stage 3\)"),
    ],
)
def test_missing_doubled_and_unknown_ops_are_named(stages: list[Ops], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        stage_edges(two_towers(), stages)


def test_a_write_in_place_passes_the_gradient_on() -> None:
    # y = zeros(); y[:] = x; loss(y): the loss names y, not the write.
    graph = two_towers(
        t2={"target": "aten.zeros.default", "inputs": (), "group": 0},
        join={"target": "aten.copy_.default", "inputs": ("t2", "i2"), "group": 0},
        loss={"inputs": ("t2",)},
    )
    assert {"i1", "i2", "join", "t2", "loss"} <= gradient_ops(graph)
