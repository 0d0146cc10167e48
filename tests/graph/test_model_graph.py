"""The graph as data: files, fingerprints, validation, the table."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graphpipe.errors import FileFormatError
from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph


@lru_cache
def example() -> ModelGraph:
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.warns(UserWarning, match="mix the samples"):
        return capture(
            model,
            (torch.zeros(4, 3),),
            targets=torch.zeros(4, dtype=torch.long),
            loss_fn=nn.functional.cross_entropy,
            name="example",
        )


def test_a_saved_graph_is_the_same_without_its_program(tmp_path: Path) -> None:
    graph = example()
    graph.save(tmp_path / "graph.json")
    loaded = ModelGraph.load(tmp_path / "graph.json")
    assert loaded.model_dump() == graph.model_dump()
    assert loaded.fingerprint == graph.fingerprint
    assert graph.program is not None
    assert loaded.program is None


def test_the_fingerprint_sees_shapes_but_not_source_lines() -> None:
    graph = example()
    moved = graph.model_copy(
        update={"ops": tuple(op.model_copy(update={"source": "x.py:1"}) for op in graph.ops)}
    )
    wider = graph.model_copy(
        update={"parameters": (graph.parameters[0].model_copy(update={"shape": (9, 3)}),)}
    )
    assert moved.fingerprint == graph.fingerprint
    assert wider.fingerprint != graph.fingerprint


def test_the_table_names_modules_shapes_parameters_and_marks() -> None:
    lines = str(example()).splitlines()
    assert lines[0].startswith("example (training): ")
    assert "input input_1 = args[0]: float32 [b, 3]" in lines[1]
    norm = next(line for line in lines if line.startswith("batch_norm"))
    assert norm.split()[:5] == ["batch_norm", "batch_norm", "1", "float32", "[b,"]
    assert ".running_mean" in norm
    assert "grad, coupled, group" in norm
    assert any("loss (sum_count)" in line for line in lines)
    assert any(line.endswith("count") for line in lines)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["ops"][1].update(name=d["ops"][0]["name"]), "is there twice"),
        (lambda d: d["ops"].reverse(), "comes later"),
        (lambda d: d["ops"][0].update(inputs=["ghost"]), "'ghost', which is unknown"),
        (lambda d: d["ops"][0].update(parameters=["ghost"]), "unknown parameter 'ghost'"),
        (lambda d: d["loss_terms"][0].update(op="ghost"), "loss term names an unknown op"),
        (lambda d: d["batch_conditions"][0].update(op="ghost"), "batch condition names"),
        (lambda d: d.update(outputs=["ghost"]), "output names an unknown op"),
        (lambda d: d.update(ops=[]), "the graph has no ops"),
        (lambda d: d["ops"][0]["output"].update(dtype="float99"), "unknown dtype"),
        (lambda d: d["ops"][0]["output"].update(shape=["b - 9"]), "negative at b = 2"),
        (lambda d: d["ops"][0]["output"].update(shape=["__import__('os')"]), "not allowed"),
        (lambda d: d["ops"][0].update(surprise=1), "surprise"),
        (lambda d: d.update(version=99), "version"),
    ],
)
def test_a_damaged_file_is_refused_by_name(change: Any, message: str) -> None:
    data = json.loads(example().to_json())
    change(data)
    with pytest.raises(FileFormatError, match=message):
        ModelGraph.from_json(json.dumps(data))
