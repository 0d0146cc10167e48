"""Finding the format of a file, and what holds for all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphpipe.cost.published.load import load_graph_file, load_piper_file
from graphpipe.cost.table import ParameterMemory
from graphpipe.errors import FileFormatError
from tests.samples import cases_dir, profiles_dir


@pytest.mark.parametrize(
    ("path", "ops", "edges", "training"),
    [
        ("pipedream/vgg16.txt", 41, 41, True),
        ("pipedream/nasnetalarge.txt", 1251, 1468, True),
        ("piper/bert32a100.json", 37, 67, True),
        ("piper/gnmt.json", 78, 104, True),
        ("dnn-partitioning/inceptionv3_inference.json", 326, 363, False),
        ("dnn-partitioning/bert24_training.json", 32, 55, True),
        ("dnn-partitioning/bert_L-12_training_operators.json", 783, 843, True),
    ],
)
def test_real_profiles(path: str, ops: int, edges: int, training: bool) -> None:
    graph, costs, _ = load_graph_file(profiles_dir() / path)
    assert len(graph.ops) == ops
    assert sum(len(items) for items in graph.predecessors) == edges
    assert graph.training is training
    costs.check(graph)
    # Per-sample costs grow in proportion, and hold for every kind of device.
    one, four = costs.op_seconds("any", 1), costs.op_seconds("other", 4)
    assert four[0].sum() == pytest.approx(4 * one[0].sum())
    assert four[1].sum() == pytest.approx(4 * one[1].sum())


def _names(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    try:
        names: list[str] = json.loads(text)["expect"]["names"]
    except ValueError:
        return []
    return names


@pytest.mark.parametrize(
    "name",
    [
        *("cycle", "duplicate_edge_is_ok_or_named", "duplicate_id", "empty", "inf_cost"),
        *("missing_field", "nan_cost", "negative_cost", "negative_devices", "negative_memory"),
        *("self_loop", "string_cost", "truncated_json", "unknown_endpoint", "zero_batch"),
        "zero_devices",
    ],
)
def test_malformed_cases_name_id_and_field(name: str) -> None:
    path = cases_dir() / "graphs" / f"c09_{name}.json"
    with pytest.raises(FileFormatError) as caught:
        load_graph_file(path)
    message = str(caught.value).replace(str(path), "")
    for expected in _names(path):
        assert expected in message


def test_sound_cases_load_with_their_defaults() -> None:
    loaded = 0
    for path in sorted((cases_dir() / "graphs").glob("c0[1-8]_*.json")):
        stated = json.loads(path.read_text(encoding="utf-8"))
        graph, costs, defaults = load_graph_file(path)
        assert defaults.devices == stated["devices"]
        assert defaults.memory_bytes == stated["device_memory"]
        assert defaults.mini_batch == stated["mini_batch"]
        assert defaults.cluster().world_size == stated["devices"]
        by_id = {node["id"]: node for node in stated["nodes"]}
        forward, backward = costs.op_seconds("published", 1)
        for i, op in enumerate(graph.ops):
            assert forward[i] == pytest.approx(by_id[op.name]["fwd"] / 1e3)
            assert backward[i] == pytest.approx(by_id[op.name]["bwd"] / 1e3)
            assert costs.output_bytes[i, 1] == by_id[op.name]["out_bytes"]
            assert costs.saved_bytes([i]) == (0.0, by_id[op.name]["act_bytes"])
        loaded += 1
    assert loaded > 20


def test_factors_for_gradients_and_optimizer_can_be_given(tmp_path: Path) -> None:
    path = _plain(tmp_path, [])
    assert load_graph_file(path).costs.parameter_memory == ParameterMemory(1.0, 0.0, 0.0)
    memory = ParameterMemory.for_optimizer("adamw")
    assert load_graph_file(path, parameter_memory=memory).costs.parameter_memory == memory


def _plain(folder: Path, edges: list[object]) -> Path:
    node = {"fwd": 1, "bwd": 2, "param_bytes": 3, "act_bytes": 4, "out_bytes": 5}
    path = folder / "plain.json"
    nodes = [{"id": 1, **node}, {"id": "two", **node}]
    path.write_text(json.dumps({"nodes": nodes, "edges": edges}), encoding="utf-8")
    return path


def test_ids_may_be_numbers_and_defaults_may_be_missing(tmp_path: Path) -> None:
    graph, _, defaults = load_graph_file(_plain(tmp_path, [[1, "two"]]))
    assert [op.name for op in graph.ops] == ["1", "two"]
    assert graph.ops[1].inputs == ("1",)
    assert defaults.devices is None


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([[1]], "pair of ids"),
        ([1], "pair of ids"),
        ([[1, None]], "field 'target'"),
        ([[1, True]], "field 'target'"),
        ([["", 1]], "field 'source'"),
    ],
)
def test_malformed_edges(tmp_path: Path, edges: list[object], message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        load_graph_file(_plain(tmp_path, edges))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": 1, "a": 2}', "'a' is there twice"),
        (b"[" * 100_000, "nests too deeply"),
        (b'{"nodes": [' + b"[" * 100_000, "nests too deeply"),
        (b"\xff\xfe{", "not valid JSON"),
        (b"a -- b -- \xff", "not UTF-8"),
        (b'{"kind": "graphpipe-graph"}', "no costs in it"),
        (b'{"nodes": {}, "edges": []}', "field 'nodes'"),
        (b'{"nodes": [3], "edges": []}', r"nodes\[0\]"),
        (b'{"edges": []}', "field 'nodes'"),
        (b'{"nodes": [{"id": 1, "fwd": 1, "bwd": 1' + b"0" * 400 + b"}]}", "absurdly large"),
        (b'{"nodes": [{"id": 1, "fwd": 1' + b"0" * 5000 + b"}]}", "not valid JSON"),
        (b'{"nodes": [{"id": [1]}]}', "Not an id"),
        (b'{"nodes": [], "edges": [], "mini_batch": 1.5}', "not a whole number"),
        (b'{"nodes": [], "edges": [], "mini_batch": true}', "not a number"),
        (b'{"nodes": [], "edges": [], "device_memory": 0}', "must be positive"),
        (b'{"nodes": [], "edges": [], "device_memory": NaN}', "not finite"),
        (b'{"nodes": [], "edges": [], "bandwidth": "fast"}', "field 'bandwidth'"),
        (b'{"nodes": [], "edges": [], "devices": 1e400}', "not a whole number"),
    ],
)
def test_malformed_files(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "graph.json"
    path.write_bytes(text)
    with pytest.raises(FileFormatError, match=message):
        load_graph_file(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="Cannot read the graph file"):
        load_graph_file(tmp_path / "none.json")
    with pytest.raises(FileFormatError, match="Cannot read the graph file"):
        load_piper_file(tmp_path)
