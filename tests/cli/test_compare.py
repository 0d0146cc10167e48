"""``graphpipe compare``."""

from __future__ import annotations

import json
from pathlib import Path

from graphpipe.planner.compare import Comparison
from tests.cli.helpers import fail, run
from tests.cli.test_plan import COSTS


def test_table_and_file(tmp_path: Path) -> None:
    costs, out = tmp_path / "costs.json", tmp_path / "compare.json"
    costs.write_text(json.dumps(COSTS))
    words = ("--graph", costs, "--devices", "2,3", "--per-device", 4, "--planners", "pipedream")
    result = run("compare", *words, "-o", out)
    rows = Comparison.load(out).rows
    assert {row.devices for row in rows} == {2, 3}
    assert {row.batch_size for row in rows} == {8, 12}
    assert any("pipedream" in row.planner for row in rows)
    ours = [row for row in rows if row.variant == "ours"]
    assert [row.ratio for row in ours] == [1.0, 1.0]
    assert "pipedream" in result.stdout


def test_wrong_use(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(COSTS))
    assert "Give one of them" in fail("compare", "--graph", costs, "-b", 8, "--per-device", 4)
    assert "Unknown planner" in fail("compare", "--graph", costs, "-b", 8, "--planners", "magic")
    assert "Not a list of numbers" in fail("compare", "--graph", costs, "-b", 8, "-n", "0")
