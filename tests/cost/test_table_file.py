"""Cost tables as JSON files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from graphpipe.cost.table import CostTable, DeviceCosts, Exclusion
from graphpipe.errors import FileFormatError
from tests.cost.test_table import table


def test_everything_survives(tmp_path: Path) -> None:
    spread = (np.full((2, 3), 0.01), np.full((2, 3), 0.02))
    costs = table(
        devices={
            "x": DeviceCosts(np.array([[1.0, 2.0, np.inf], [1e-9, 1.0, 1.0]]), np.ones((2, 3)), 3.0)
        },
        corrections={"x": (0.9, 1.1)},
        exclusions=(Exclusion("a", 8, "out of memory"),),
        notes=("note",),
        spreads={"x": spread},
        hosts={"x": "AMD EPYC, 1 threads"},
        torch_version="2.13.0",
    )
    costs.save(tmp_path / "t.json")
    again = CostTable.load(tmp_path / "t.json")
    for name in ("fingerprint", "source", "ops", "micro_batches", "saved", "parameter_memory"):
        assert getattr(again, name) == getattr(costs, name)
    for name in ("corrections", "exclusions", "notes", "hosts", "torch_version"):
        assert getattr(again, name) == getattr(costs, name)
    for name in ("output_bytes", "gradient_bytes", "storages", "workspace_bytes"):
        assert np.array_equal(getattr(again, name), getattr(costs, name))
    assert np.array_equal(again.storage_squares, costs.storage_squares)
    assert np.array_equal(again.devices["x"].forward, costs.devices["x"].forward)
    assert again.devices["x"].optimizer_seconds_per_byte == 3.0
    assert np.array_equal(again.spreads["x"][1], spread[1])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kind", "graphpipe-plan", "field 'kind'"),
        ("version", 2, "field 'version'"),
        ("source", "guessed", "field 'source'"),
        ("micro_batches", [8, 4, 2], "micro_batches"),
        ("output_bytes", [[1.0]], "output_bytes"),
        ("storages", [["a", 1.0]], "storages"),
        ("saved", [[0], [7]], "saved"),
        ("extra", 1, "extra"),
        ("exclusions", [["zz", 1, ""]], "exclusions"),
        ("parameter_memory", [1.0], "parameter_memory"),
    ],
)
def test_tampered_files_are_refused(
    tmp_path: Path, field: str, value: object, message: str
) -> None:
    table().save(tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    data[field] = value
    (tmp_path / "t.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(FileFormatError, match=message):
        CostTable.load(tmp_path / "t.json")


@pytest.mark.parametrize("value", [-1.0, "1", True])
def test_tampered_times_are_refused(tmp_path: Path, value: object) -> None:
    table().save(tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    data["devices"]["x"]["forward"][1][2] = value
    (tmp_path / "t.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(FileFormatError, match=r"devices\.x\.forward"):
        CostTable.load(tmp_path / "t.json")
    data["devices"]["x"]["forward"][1] = [1.0]
    (tmp_path / "t.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(FileFormatError, match="wrong length"):
        CostTable.load(tmp_path / "t.json")
