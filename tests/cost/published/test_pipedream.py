"""PipeDream's graph.txt."""

from __future__ import annotations

import pytest

from graphpipe.cost.published.load import load_graph_file
from graphpipe.cost.published.pipedream import read_pipedream
from graphpipe.errors import FileFormatError
from tests.samples import profiles_dir

VALUES = (
    "forward_compute_time={f}, backward_compute_time=4.000, "
    "activation_size={a}, parameter_size=8.000"
)


def _line(name: str, what: str, f: str = "2.000", a: str = "16.000") -> str:
    return f"{name} -- {what} -- " + VALUES.format(f=f, a=a)


TEXT = "\n".join(
    [
        _line("node1", "Input0"),
        _line("node2", "LSTM(2, 3, (x): y -> z)", a="[16.0; 4.0; 4.0]") + " -- stage_id=0",
        _line("node3", "__getitem__(0)"),
        _line("node4", "__getitem__(1)"),
        "\tnode1 -- node2",
        "\tnode2 -- node3",
        "\tnode2 -- node4",
        "\tnode4 -- node5",
        "",
        _line("node5", "Linear"),
    ]
)


def _read(text: str, batch: int | None = None) -> object:
    return read_pipedream(text, name="g", where="g.txt", profiled_batch=batch)


def test_inputs_weigh_nothing_and_unused_outputs_are_left_out() -> None:
    graph, costs, defaults = read_pipedream(TEXT, name="g", where="g.txt", profiled_batch=4)
    assert [op.name for op in graph.ops] == ["node1", "node2", "node4", "node5"]
    forward, backward = costs.op_seconds("x", 4)
    assert forward.tolist() == pytest.approx([0.0, 2e-3, 2e-3, 2e-3])
    assert backward.tolist() == pytest.approx([0.0, 4e-3, 4e-3, 4e-3])
    assert costs.output_bytes[:, 1].tolist() == [0.0, 6.0, 4.0, 4.0]
    assert costs.saved_bytes([1, 2]) == (0.0, 10.0)
    assert [item.nbytes for item in graph.parameters] == [8, 8, 8]
    assert not graph.ops[0].requires_grad
    assert defaults.micro_batch == 4
    assert len(costs.notes) == 2


def test_without_a_profiled_batch_the_mini_batch_is_one_sample() -> None:
    _, costs, _ = read_pipedream(TEXT, name="g", where="g.txt")
    assert "one sample" in costs.notes[-1]
    assert costs.op_seconds("x", 1)[0][1] == pytest.approx(2e-3)


def test_vgg16_is_read_as_measured() -> None:
    graph, costs, _ = load_graph_file(profiles_dir() / "pipedream/vgg16.txt", profiled_batch=128)
    row = graph.op_index["node12"]  # Conv2d(128, 256, 3x3): 10.814 and 18.335 ms for 128 images
    forward, backward = costs.op_seconds("x", 128)
    assert (forward[row], backward[row]) == (pytest.approx(10.814e-3), pytest.approx(18.335e-3))
    assert costs.output_bytes[row, 1] * 128 == pytest.approx(411041792)
    assert graph.parameter_by_name["node12"].nbytes == 1180672


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("node5 -- Linear", "node2 -- Linear", "An id is there twice.*'node2'"),
        ("\tnode4 -- node5", "\tnode4 -- node9", "unknown node 'node9'"),
        ("\tnode4 -- node5", "\tnode4", "Not an edge.*line 8"),
        ("\tnode4 -- node5", "\tnode4 -- node4", "'node4' to itself"),
        ("\tnode2 -- node4", "\tnode2 -- node4\n\tnode5 -- node2", "has a cycle"),
        ("node5 -- Linear -- ", "node5 -- ", "Not a node.*line 10"),
        ("Linear -- forward_compute_time=2.000", "Linear -- forward_compute_time=-2", "negative"),
        ("Linear -- forward_compute_time=2.000", "Linear -- forward_compute_time=nan", "finite"),
        ("Linear -- forward_compute_time=2.000", "Linear -- forward_compute_time=[1; 2]", "number"),
        ("Linear -- forward_compute_time=2.000, ", "Linear -- ", "field 'forward_compute_time'"),
        ("Linear -- forward_compute_time=2.000", "Linear -- forward_compute_time", "without a key"),
        ("[16.0; 4.0; 4.0]", "[16.0; -4.0; 4.0]", "'node2', field 'activation_size'"),
        ("[16.0; 4.0; 4.0]", "[16.0; inf]", "'node2', field 'activation_size'"),
        ("[16.0; 4.0; 4.0]", "[]", "'node2', field 'activation_size'"),
    ],
)
def test_malformed(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(FileFormatError, match=message):
        _read(TEXT.replace(old, new))


def test_malformed_batch() -> None:
    with pytest.raises(FileFormatError, match="Not a profiled batch"):
        _read(TEXT, batch=-1)
