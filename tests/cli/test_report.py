from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graphpipe.cli.app import app
from tests.report import factory


@pytest.fixture
def plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    plan, timeline = factory.two_towers()
    plan.save("plan.json")
    factory.measured_of(timeline).save("measured.json")
    return tmp_path / "plan.json"


def test_the_page_and_its_companions_are_written(plan_file: Path) -> None:
    done = CliRunner().invoke(
        app, ["report", "plan.json", "--trace", "measured.json", "--csv", "s.csv", "--svg", "t.svg"]
    )
    assert done.exit_code == 0, done.output
    assert "The bottleneck is device 0" in done.stdout
    assert "Wrote report.html, s.csv, t.svg." in done.stderr
    page = Path("report.html").read_text(encoding="utf-8")
    assert '"label":"Measured"' in page
    assert Path("s.csv").read_text(encoding="utf-8").startswith("0F0,0F1")
    assert Path("t.svg").read_text(encoding="utf-8").startswith("<svg")


def test_json_names_the_files(plan_file: Path) -> None:
    done = CliRunner().invoke(app, ["report", "plan.json", "-o", "page.html", "--json"])
    result = json.loads(done.stdout)
    assert result["written"] == ["page.html"]
    assert any("bubble" in sentence for sentence in result["sentences"])


def test_a_trace_of_another_plan_is_refused_in_one_paragraph(plan_file: Path) -> None:
    _, other = factory.chain(2, 2)
    other.save("other.json")
    done = CliRunner().invoke(app, ["report", "plan.json", "--trace", "other.json"])
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: The timeline is not of this plan")
    assert len(done.stderr.splitlines()) == 1
    assert not Path("report.html").exists()
