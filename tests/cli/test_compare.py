"""``graphpipe compare``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graphpipe.cli.app import app
from graphpipe.planner import compare
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


def test_an_interruption_keeps_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs, out = tmp_path / "costs.json", tmp_path / "compare.json"
    costs.write_text(json.dumps(COSTS))
    whole = compare.Contest.run

    def run_until_interrupted(self: compare.Contest, planner: str) -> compare.Compared:
        if planner == "piper":
            raise KeyboardInterrupt
        return whole(self, planner)

    monkeypatch.setattr(compare.Contest, "run", run_until_interrupted)
    words = ("--graph", costs, "--devices", "2", "-b", 4, "--planners", "pipedream,piper")
    result = CliRunner().invoke(app, ["compare", *map(str, words), "-o", str(out)])
    assert result.exit_code == 130
    assert "Interrupted: 2 rows" in result.stderr
    assert [row.planner for row in compare.Comparison.load(out).rows] == ["gpp", "pipedream"]
    assert "pipedream" in result.stdout


def test_its_file_is_shown_in_the_report_of_a_plan(tmp_path: Path) -> None:
    costs, rows, page = (tmp_path / name for name in ("costs.json", "rows.json", "page.html"))
    costs.write_text(json.dumps(COSTS))
    given = ("--graph", costs, "--devices", "2", "-b", 8)
    run("compare", *given, "--planners", "chain,pipedream,piper,1f1b", "-o", rows)
    run("plan", *given, "-o", tmp_path / "plan.json")
    run("report", tmp_path / "plan.json", "--comparison", rows, "-o", page)
    text = page.read_text(encoding="utf-8")
    for row in Comparison.load(rows).rows:
        if row.variant != "ours":
            assert f'"planner":"{row.planner}"' in text
            assert f'"iteration_ns":{row.iteration_ns}' in text
