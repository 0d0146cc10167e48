from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from graphpipe.errors import PlanError
from graphpipe.planner.compare import Comparison, ComparisonRow
from graphpipe.report.page import render, write_report
from graphpipe.simulate.timeline import Event
from tests.report import factory


def embedded(page: str) -> dict[str, Any]:
    found = re.search(
        r'<script type="application/json" id="report-data">(.*?)</script>', page, re.S
    )
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_needs_nothing_but_itself() -> None:
    page = render(*factory.two_towers())
    assert "default-src &#x27;none&#x27;" in page
    assert not re.search(r"<(?:link|script|img|iframe)[^>]+(?:src|href)\s*=", page)
    assert "@import" not in page
    assert "sourceMappingURL" not in page
    assert "{{" not in page.split("<script>")[0]


def test_the_licences_of_the_libraries_travel_with_the_page() -> None:
    page = render(*factory.two_towers())
    assert "Mike Bostock" in page
    assert "Chris Pettitt" in page
    assert "Permission to use, copy, modify" in page


def test_the_size_grows_by_few_bytes_an_event() -> None:
    """64 devices with 256 micro-batches have 65,000 events and messages: under 5 MB."""
    (small, few), (large, many) = factory.chain(2, 2), factory.chain(8, 64)
    growth = len(render(large, many)) - len(render(small, few))
    assert growth < 65 * (len(many.events) + len(many.transfers))


def test_the_data_says_what_the_plan_says() -> None:
    plan, timeline = factory.two_towers()
    data = embedded(render(plan, timeline))
    assert [stage["name"] for stage in data["stages"]] == [stage.name for stage in plan.stages]
    assert data["timelines"][0]["iteration_ns"] == timeline.iteration_ns
    assert data["idle_devices"] == [6]


def test_names_cannot_leave_the_data_block() -> None:
    page = render(*factory.hostile())
    assert page.count("</script>") == page.count("<script")
    assert "<img src=x" not in page
    assert embedded(page)["stages"][0]["name"] == factory.NASTY


def test_a_timeline_of_another_size_is_refused(tmp_path: Path) -> None:
    plan, _ = factory.two_towers()
    _, other = factory.chain(2, 2)
    with pytest.raises(PlanError, match=r"not of this plan .*7 devices, as in the plan, got 2"):
        write_report(plan, other, path=tmp_path / "report.html")


def test_a_timeline_with_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    plan, timeline = factory.two_towers()
    event = Event(rank=0, kind="F", start_ns=0, end_ns=1, stage=5, micro_batch=0)
    wrong = timeline.model_copy(update={"events": (event,)})
    with pytest.raises(PlanError, match="a stage from 0 to 4, got 5"):
        write_report(plan, timeline, measured=wrong, path=tmp_path / "report.html")


def test_a_comparison_of_another_model_or_size_is_refused() -> None:
    plan, timeline = factory.two_towers()
    row = ComparisonRow(
        model="two-towers", planner="piper", variant="as published", devices=8, batch_size=32,
        memory_bytes=1, units=5,
    )  # fmt: skip
    with pytest.raises(PlanError, match=r"on 7 devices with 32 samples, got model .* on 8 devices"):
        render(plan, timeline, comparison=Comparison(rows=(row,)))
    with pytest.raises(PlanError, match="got no row"):
        render(plan, timeline, comparison=Comparison())
