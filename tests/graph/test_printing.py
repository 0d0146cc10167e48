"""A graph as a table."""

from __future__ import annotations

from graphpipe.graph.model_graph import TensorSpec
from graphpipe.graph.printing import graph_text, shape_text
from tests.graph.small import small


def test_a_shape_is_written_in_the_batch() -> None:
    assert shape_text(TensorSpec(shape=("b", "8 * b", 16), dtype="int64")) == "int64 [b, 8*b, 16]"


def test_every_op_has_a_line_with_its_marks() -> None:
    _, graph = small()
    lines = graph_text(graph).splitlines()
    assert lines[0].startswith(f"small (training): {len(graph.ops)} ops")
    norm = next(op for op in graph.ops if op.target.startswith("aten.batch_norm"))
    line = next(line for line in lines if line.startswith(f"{norm.name} "))
    assert "coupled" in line
    assert ".weight" in line
    start = next(i for i, text in enumerate(lines) if text.startswith("---"))
    assert [text.split()[0] for text in lines[start + 1 :]] == [op.name for op in graph.ops]
    assert sum("loss (mean)" in text for text in lines) == 1
