"""The JSON of the DNN-partitioning project."""

from __future__ import annotations

import json

import pytest

from graphpipe.cost.published.dnn_partitioning import HOST_BANDWIDTH, read_dnn_partitioning
from graphpipe.cost.published.fields import Fields
from graphpipe.cost.published.load import load_graph_file
from graphpipe.errors import FileFormatError
from tests.samples import profiles_dir


def _node(
    identity: int, name: str, ms: float, *, back: int = 0, color: int | None = None
) -> object:
    node = {"id": identity, "name": name, "fpgaLatency": ms, "cpuLatency": 9.0, "size": 10.0}
    node |= {"isBackwardNode": back, "supportedOnFpga": 1}
    return node if color is None else {**node, "colorClass": color}


def _edge(source: int, target: int, nbytes: float, scale: float = 1.0) -> object:
    cost = nbytes / HOST_BANDWIDTH * scale
    return {"sourceId": source, "destId": target, "cost": cost, "size": nbytes}


def _file(nodes: list[object], edges: list[object]) -> Fields:
    values = {"maxFPGAs": 3, "maxSizePerFPGA": 99.0, "maxCPUs": 1}
    return Fields({**values, "nodes": nodes, "edges": edges}, "d.json")


TRAINING = _file(
    [
        _node(1, "w", 0.0, color=1),
        _node(2, "MatMul1", 2.0, color=1),
        _node(3, "Relu", 1.0, color=2),
        _node(4, "Loss", 0.5, back=1, color=3),
        _node(5, "Relu_Grad/x", 1.5, back=1, color=2),
        _node(6, "MatMul1_Grad/a", 3.0, back=1, color=1),
        _node(7, "w_adam", 0.25, back=1, color=1),
        _node(8, "Accumulate", 0.125, back=1),
    ],
    [
        *(_edge(1, 2, 64.0), _edge(2, 3, 32.0), _edge(3, 4, 16.0), _edge(4, 5, 16.0)),
        *(_edge(5, 8, 32.0), _edge(8, 6, 32.0), _edge(2, 6, 32.0), _edge(6, 7, 64.0)),
    ],
)


def test_backward_nodes_join_their_forward_nodes() -> None:
    graph, costs, defaults = read_dnn_partitioning(TRAINING, name="d")
    assert [op.name for op in graph.ops] == ["1", "2", "3"]
    forward, backward = costs.op_seconds("x", 1)
    assert forward.tolist() == pytest.approx([0.0, 2e-3, 1e-3])
    # 4 (a class of its own) reads 3; 8 (no class) follows 5, which belongs to 3.
    assert backward.tolist() == pytest.approx([0.25e-3, 3e-3, 1.5e-3 + 0.5e-3 + 0.125e-3])
    assert costs.output_bytes[:, 1].tolist() == pytest.approx([64.0, 32.0, 16.0])
    assert [op.group for op in graph.ops] == [0, 0, None]
    held = {item.name: item.nbytes for item in graph.parameters}
    assert held == {"1": 10, "1.constant": 10, "2": 10, "2.constant": 10, "3": 10, "3.constant": 30}
    assert (defaults.devices, defaults.memory_bytes, defaults.bandwidth) == (3, 99, HOST_BANDWIDTH)


def test_edges_in_milliseconds_are_recognised() -> None:
    nodes = [_node(1, "a", 1.0), _node(2, "b", 1.0)]
    for scale in (1.0, 1e3):
        _, costs, _ = read_dnn_partitioning(_file(nodes, [_edge(1, 2, 64.0, scale)]), name="d")
        assert costs.output_bytes[0, 1] == pytest.approx(64.0)


def test_a_class_with_other_nodes_in_between_is_noted_and_not_grouped() -> None:
    nodes = [_node(1, "a", 1.0, color=1), _node(2, "b", 1.0), _node(3, "c", 1.0, color=1)]
    edges = [_edge(1, 2, 1.0), _edge(2, 3, 1.0)]
    graph, costs, _ = read_dnn_partitioning(_file(nodes, edges), name="d")
    assert [op.group for op in graph.ops] == [None, None, None]
    assert "colour class 1" in costs.notes[0]


def test_classes_that_are_tied_crosswise_become_one_group() -> None:
    nodes = [_node(i, f"n{i}", 1.0, color=color) for i, color in ((1, 1), (2, 2), (3, 2), (4, 1))]
    graph, _, _ = read_dnn_partitioning(
        _file(nodes, [_edge(1, 2, 1.0), _edge(3, 4, 1.0)]), name="d"
    )
    assert [op.group for op in graph.ops] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "name", ["bert24_training", "gnmt_training", "bert_L-12_training_operators"]
)
def test_no_time_is_lost_in_merging(name: str) -> None:
    path = profiles_dir() / f"dnn-partitioning/{name}.json"
    stated = json.loads(path.read_text(encoding="utf-8"))["nodes"]
    graph, costs, _ = load_graph_file(path)
    forward, backward = costs.op_seconds("x", 1)
    for times, flag in ((forward, 0), (backward, 1)):
        want = sum(node["fpgaLatency"] for node in stated if node["isBackwardNode"] == flag)
        assert times.sum() == pytest.approx(want / 1e3)
    assert sum(item.nbytes for item in graph.parameters) == pytest.approx(
        sum(node["size"] for node in stated)
    )


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ([_node(1, "a", 1.0, back=1)], [], "Every node is a backward node"),
        ([], [], "is empty"),
        ([_node(1, "a", 1.0), _node(1, "b", 1.0)], [], "node '1'"),
        ([_node(1, "a", -1.0)], [], "node '1', field 'fpgaLatency'"),
        ([_node(1, "a", 1.0)], [_edge(1, 2, 1.0)], "unknown node '2'"),
        ([_node(1, "a", 1.0)], [_edge(1, 1, 1.0)], "cycle: '1'"),
        (
            [_node(1, "a", 1.0), _node(2, "b", 1.0), _node(3, "c", 1.0)],
            [_edge(1, 2, 1.0), _edge(2, 3, 1.0), _edge(3, 2, 1.0)],
            "cycle: '[23]' -> '[23]'",
        ),
        ([_node(1, "a", 1.0, back=2)], [], "node '1', field 'isBackwardNode'"),
        ([_node(1, "a", 1.0)], [{"sourceId": 1, "destId": 1}], r"edges\[0\], field 'cost'"),
    ],
)
def test_malformed(nodes: list[object], edges: list[object], message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        read_dnn_partitioning(_file(nodes, edges), name="d")
