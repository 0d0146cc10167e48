"""Piper's JSON."""

from __future__ import annotations

import copy

import pytest

from graphpipe.cost.published.fields import Fields
from graphpipe.cost.published.load import load_graph_file, load_piper_file
from graphpipe.cost.published.piper import RECOMPUTE, VANILLA, parse_piper, read_piper
from graphpipe.errors import FileFormatError
from tests.samples import profiles_dir

CONFIG: dict[str, object] = {
    "id": VANILLA,
    "timePerSample": 0.3,
    "parameterSize": 100.0,
    "memoryUsageA": 7.0,
    "memoryUsageB": 250.0,
    "syncTimeFw": {},
    "syncTimeBw": {"1": 4.0},
}
FILE: dict[str, object] = {
    "maxDevices": 4,
    "maxMemoryPerDevice": 1000.0,
    "bandwidth": 50.0,
    "mbsInBatch": 16,
    "nodes": [
        {"id": 0, "name": "first", "TMPCs": {"1": [CONFIG, {**CONFIG, "id": RECOMPUTE}]}},
        {"id": 1, "name": "second", "TMPCs": {"1": [{**CONFIG, "memoryUsageB": 200.0}]}},
        {"id": 2, "name": "third", "TMPCs": {"1": [CONFIG], "2": [CONFIG]}},
    ],
    "edges": [
        {"sourceId": 0, "destId": 1, "communicationCost": 8.0},
        {"sourceId": 0, "destId": 2, "communicationCost": 9.0},
    ],
}


def _read(change: object = None) -> Fields:
    data = copy.deepcopy(FILE)
    if callable(change):
        change(data)
    return Fields(data, "p.json")


def test_graph_and_costs() -> None:
    graph, costs, defaults = read_piper(_read(), name="p")
    assert costs.stage_seconds([0], "x", 1) == (pytest.approx(0.1), pytest.approx(0.2))
    assert costs.saved_bytes([0]) == (0.0, 7.0)
    assert costs.output_bytes[:, 1].tolist() == [9.0, 0.0, 0.0]
    # memoryUsageB = 2 x parameters + 50; the second node has nothing beyond 2 x parameters.
    memory = costs.parameter_memory
    assert (memory.weight, memory.gradient, memory.optimizer) == (1.0, 1.0, 0.0)
    assert {item.name: item.nbytes for item in graph.parameters} == {
        "0": 100,
        "0.constant": 50,
        "1": 100,
        "2": 100,
        "2.constant": 50,
    }
    assert (defaults.devices, defaults.memory_bytes, defaults.bandwidth) == (4, 1000, 50.0)
    assert (defaults.mini_batch, defaults.micro_batch) == (16, 1)


def test_the_whole_file_is_kept_for_pipers_own_planner() -> None:
    file = parse_piper(_read())
    assert set(file.nodes[0].configurations) == {(1, VANILLA), (1, RECOMPUTE)}
    assert set(file.nodes[2].configurations) == {(1, VANILLA), (2, VANILLA)}
    assert file.nodes[0].configurations[1, VANILLA].sync_backward == {"1": 4.0}
    assert file.edges == {("0", "1"): 8.0, ("0", "2"): 9.0}


def test_unit_of_time() -> None:
    bert = load_graph_file(profiles_dir() / "piper/bert32a100.json")
    assert bert.costs.notes == ()
    assert 0.9 < sum(bert.costs.stage_seconds(range(37), "x", 1)) < 1.0
    gnmt = load_graph_file(profiles_dir() / "piper/gnmt.json")
    assert "milliseconds" in gnmt.costs.notes[0]
    assert 0.5 < sum(gnmt.costs.stage_seconds(range(78), "x", 1)) < 0.6
    stated = load_piper_file(profiles_dir() / "piper/gnmt.json", time_unit="s")
    assert stated.notes == ()
    assert max(c.seconds for n in stated.nodes for c in n.configurations.values()) > 50
    assert load_piper_file(profiles_dir() / "piper/bert32a100.json").micro_batches == 1920
    with pytest.raises(FileFormatError, match="not an input file of Piper"):
        load_piper_file(profiles_dir() / "dnn-partitioning/bert24_training.json")


def _drop_vanilla(data: dict[str, list[dict[str, dict[str, object]]]]) -> None:
    data["nodes"][0]["TMPCs"] = {"2": [CONFIG]}


def _negative(data: dict[str, list[dict[str, dict[str, object]]]]) -> None:
    data["nodes"][1]["TMPCs"] = {"1": [{**CONFIG, "memoryUsageA": -1.0}]}


def _degree(data: dict[str, list[dict[str, dict[str, object]]]]) -> None:
    data["nodes"][1]["TMPCs"] = {"one": [CONFIG]}


def _twice(data: dict[str, list[dict[str, dict[str, object]]]]) -> None:
    data["nodes"][1]["TMPCs"] = {"1": [CONFIG, CONFIG]}


def _sync(data: dict[str, list[dict[str, dict[str, object]]]]) -> None:
    data["nodes"][1]["TMPCs"] = {"1": [{**CONFIG, "syncTimeFw": {"0": "x"}}]}


def _batches(data: dict[str, object]) -> None:
    data["mbsInBatch"] = 0


def _cost(data: dict[str, list[dict[str, object]]]) -> None:
    del data["edges"][1]["communicationCost"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop_vanilla, "node '0', field 'TMPCs'"),
        (_negative, "node '1'.*field 'memoryUsageA'"),
        (_degree, "node '1', field 'TMPCs', field 'one'"),
        (_twice, "node '1'.*field 'id'"),
        (_sync, "field 'syncTimeFw', field '0'"),
        (_batches, "field 'mbsInBatch'"),
        (_cost, r"edges\[1\], field 'communicationCost'"),
    ],
)
def test_malformed(change: object, message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        read_piper(_read(change), name="p")
