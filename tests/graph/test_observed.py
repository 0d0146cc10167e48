"""What fake runs say of an op, as functions of the batch."""

from __future__ import annotations

from graphpipe.graph.split_joins import splittable
from tests.graph.joined import Joined, captured


def test_shapes_work_and_memory_are_functions_of_the_batch() -> None:
    graph = captured(Joined().float())
    join = next(op for op in graph.ops if op.module == "join")
    assert join.output is not None
    assert join.output.shape == ("b", 8)
    assert join.forward.flops == "192*b"
    assert join.backward.flops == "384*b"
    cat = splittable(graph).joins[0].x.name
    assert [(item.id, item.bytes) for item in join.saves] == [(cat, "48*b")]
