from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from graphpipe.plan.plan import Plan
from graphpipe.planner.compare import Comparison, ComparisonRow
from graphpipe.report.page import render, write_report
from graphpipe.simulate.timeline import Timeline
from graphpipe.simulate.usage import device_uses
from graphpipe.units import format_bytes, format_ns
from tests.report import factory
from tests.report.browser import chromium, screenshot

__all__ = ["chromium"]

ROWS = Comparison(
    rows=(
        ComparisonRow(
            model="two-towers", planner="pipedream", variant="as published", devices=7,
            batch_size=32, memory_bytes=16 * factory.GIB, units=5, iteration_ns=179_400,
            bubble=0.31, depth=6, peak_memory_bytes=7 * factory.GIB, search_seconds=1.25,
        ),
        ComparisonRow(
            model="two-towers", planner="piper", variant="as published", devices=7, batch_size=32,
            memory_bytes=16 * factory.GIB, units=5, note="more than 40,000 down-sets",
        ),
    )
)  # fmt: skip


def open_page(browser: Any, path: Path, plan: Plan, timeline: Timeline, **more: Any) -> None:
    write_report(plan, timeline, path=path, **more)
    browser.get_log("browser")
    browser.get(path.as_uri())
    script = "return document.documentElement.dataset.ready"
    deadline = time.monotonic() + 30
    while browser.execute_script(script) != "true" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert browser.execute_script(script) == "true", browser.get_log("browser")


def errors(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]


def texts(browser: Any, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((node) => node.textContent)"
    found: list[str] = browser.execute_script(script, selector)
    return found


def dark_share(browser: Any, index: int, colour: str) -> float:
    """Share of a timeline's pixels that have one of the page's colours."""
    share: float = browser.execute_script(
        """
        const canvas = document.querySelector(`canvas[data-timeline="${arguments[0]}"]`);
        const probe = document.createElement("canvas");
        [probe.width, probe.height] = [canvas.width, canvas.height + 1];
        const context = probe.getContext("2d", { willReadFrequently: true });
        context.drawImage(canvas, 0, 0);
        context.fillStyle = GP.dom.colour(arguments[1]);
        context.fillRect(0, canvas.height, 1, 1);
        const want = context.getImageData(0, canvas.height, 1, 1).data;
        const have = context.getImageData(0, 0, canvas.width, canvas.height).data;
        let count = 0;
        for (let i = 0; i < have.length; i += 4)
          if (have[i] === want[0] && have[i + 1] === want[1] && have[i + 2] === want[2]) count += 1;
        return count / (have.length / 4);
        """,
        index,
        colour,
    )
    return share


def test_it_loads_without_a_word_on_the_console(chromium: Any, tmp_path: Path) -> None:
    plan, timeline = factory.two_towers()
    measured = factory.measured_of(timeline)
    open_page(chromium, tmp_path / "r.html", plan, timeline, measured=measured, comparison=ROWS)
    path = screenshot(chromium, "report")
    assert [text.split()[0] for text in texts(chromium, ".timeline h3")] == [
        "Predicted",
        "Measured",
    ]
    assert path.stat().st_size > 50_000
    assert errors(chromium) == []


def test_the_numbers_shown_are_the_plans(chromium: Any, tmp_path: Path) -> None:
    plan, timeline = factory.two_towers()
    open_page(chromium, tmp_path / "r.html", plan, timeline, comparison=ROWS)
    assert texts(chromium, "#model-name") == ["two-towers"]
    tiles = dict(
        zip(texts(chromium, ".tile dt"), texts(chromium, ".tile dd:first-of-type"), strict=True)
    )
    assert tiles["Iteration"] == format_ns(timeline.iteration_ns)
    assert tiles["Samples a second"] == f"{32 / timeline.iteration_ns * 1e9:,.0f}"
    assert tiles["Peak memory"] == format_bytes(timeline.peak_memory[0])
    assert tiles["Depth"] == "3"
    uses = device_uses(plan, timeline)
    rows = texts(chromium, "#devices tbody tr")
    for use, row in zip(uses, rows, strict=True):
        assert format_ns(use.forward_ns) in row
        assert format_ns(use.backward_ns) in row
        assert format_ns(use.wait_ns) in row
    for stage, row in zip(plan.stages, texts(chromium, "#stages tbody tr"), strict=True):
        times = stage.times[factory.KIND]
        assert stage.name in row
        assert format_ns(times.forward_ns) in row
        assert format_ns(times.backward_ns) in row
        assert format_bytes(stage.memory.static) in row
    for stage, card in zip(plan.stages, texts(chromium, ".stage-card"), strict=True):
        assert stage.name in card
        assert f"micro-batch {stage.micro_batch}" in card
        assert ", ".join(stage.modules) in card
    assert texts(chromium, ".edge text") == ["2 KiB"] * 4
    ours, pipedream, piper = texts(chromium, "#comparison tbody tr")
    assert "gpp (this plan)" in ours
    assert f"{179_400 / timeline.iteration_ns:.2f} \u00d7 as fast" in pipedream
    assert "more than 40,000 down-sets" in piper


def test_python_and_page_write_quantities_alike(chromium: Any, tmp_path: Path) -> None:
    open_page(chromium, tmp_path / "r.html", *factory.two_towers())
    values = [0, 1, 7, 999, 1000, 1023, 1024, 1536, 99_995, 999_949, 999_950, 10**6]
    values += [
        1088,
        9_999_500,
        123_456_789,
        2**30 - 1,
        2**30,
        2**34 + 12345,
        9_999_500_000,
        3 * 2**40,
    ]
    script = "return arguments[0].map((v) => [GP.format.time(v), GP.format.bytes(v)])"
    shown = chromium.execute_script(script, values)
    assert shown == [[format_ns(value), format_bytes(value)] for value in values]


def test_a_click_on_a_stage_selects_it_everywhere(chromium: Any, tmp_path: Path) -> None:
    open_page(chromium, tmp_path / "r.html", *factory.two_towers())
    before = dark_share(chromium, 0, "--forward")
    chromium.find_element("css selector", '.stage-card[data-stage="4"]').click()
    assert texts(chromium, "#details h3") == ["Stage 4: head"]
    assert texts(chromium, ".stage-card.selected .name") == ["4  head"]
    selected = "return [...document.querySelectorAll(arguments[0])].map((n) => n.dataset.rank)"
    assert chromium.execute_script(selected, ".memory-card.selected") == ["4", "5"]
    assert chromium.execute_script(selected, "#devices tr.selected") == ["4", "5"]
    assert len(texts(chromium, "#stages tr.selected")) == 1
    assert len(texts(chromium, ".edge.touching")) == 2
    assert 0 < dark_share(chromium, 0, "--forward") < before / 2
    screenshot(chromium, "report-selected")
    chromium.find_element("css selector", "body").send_keys("\ue00c")
    assert texts(chromium, "#details h3") == ["No stage picked"]
    assert dark_share(chromium, 0, "--forward") == pytest.approx(before)
    assert errors(chromium) == []


def test_a_row_of_the_table_and_the_keyboard_select_too(chromium: Any, tmp_path: Path) -> None:
    open_page(chromium, tmp_path / "r.html", *factory.two_towers())
    row = chromium.find_element("css selector", '#stages tr[data-stage="1"]')
    chromium.execute_script("arguments[0].scrollIntoView({block: 'center'})", row)
    row.click()
    assert texts(chromium, "#details h3") == ["Stage 1: image.1"]
    card = chromium.find_element("css selector", '.stage-card[data-stage="2"]')
    card.send_keys("\n")
    assert texts(chromium, "#details h3") == ["Stage 2: text.0"]
    assert card.get_attribute("aria-pressed") == "true"


def test_a_micro_batch_is_followed_through_all_stages(chromium: Any, tmp_path: Path) -> None:
    plan, timeline = factory.two_towers()
    open_page(chromium, tmp_path / "r.html", plan, timeline)
    assert dark_share(chromium, 0, "--follow") == 0
    chromium.find_element("id", "follow-sample").send_keys("13")
    [status] = texts(chromium, "#follow-status")
    # One forward and one backward in each of five stages holds sample 13.
    assert status.startswith("Following sample 13: 10 tasks from ")
    assert dark_share(chromium, 0, "--follow") > 0
    covering = [
        event
        for event in timeline.events
        if event.stage >= 0 and event.micro_batch == 13 // plan.stages[event.stage].micro_batch
    ]
    assert format_ns(min(event.start_ns for event in covering)) in status
    assert format_ns(max(event.end_ns for event in covering)) in status
    screenshot(chromium, "report-followed")


def test_a_click_on_a_task_follows_its_samples(chromium: Any, tmp_path: Path) -> None:
    plan, timeline = factory.two_towers()
    open_page(chromium, tmp_path / "r.html", plan, timeline)
    target = next(e for e in timeline.events if e.stage == 3 and e.micro_batch == 2)
    middle = (target.start_ns + target.end_ns) / 2
    chromium.execute_script(
        """
        const canvas = document.querySelector('canvas[data-timeline="0"]');
        canvas.scrollIntoView({block: "center"});
        const box = canvas.getBoundingClientRect(), left = GP.paint.GUTTER;
        const x = left + (arguments[0] / arguments[1]) * (box.width - 8 - left);
        const y = GP.paint.AXIS + 3.4 * ((box.height - GP.paint.AXIS) / 7);
        const where = {bubbles: true, clientX: box.left + x, clientY: box.top + y};
        canvas.dispatchEvent(new MouseEvent("mousemove", where));
        canvas.dispatchEvent(new MouseEvent("click", where));
        """,
        middle,
        timeline.iteration_ns,
    )
    assert texts(chromium, "#follow-status")[0].startswith("Following samples 8 to 11: ")
    assert texts(chromium, "#tooltip b") == ["forward of stage 3: text.1"]


def test_zooming_shows_a_part_of_the_iteration_in_both_timelines(
    chromium: Any, tmp_path: Path
) -> None:
    plan, timeline = factory.two_towers()
    measured = factory.measured_of(timeline)
    open_page(chromium, tmp_path / "r.html", plan, timeline, measured=measured)
    canvases = "[...document.querySelectorAll('.timeline canvas')]"
    scales = f"return {canvases}.map((canvas) => d3.zoomTransform(canvas).k)"
    assert chromium.execute_script(scales) == [1, 1]
    chromium.find_element("id", "zoom-in").click()
    assert chromium.execute_script(scales) == [2, 2]
    chromium.find_element("id", "zoom-fit").click()
    assert chromium.execute_script(scales) == [1, 1]


def test_names_from_the_model_stay_text(chromium: Any, tmp_path: Path) -> None:
    open_page(chromium, tmp_path / "r.html", *factory.hostile())
    card = chromium.find_element("css selector", '.stage-card[data-stage="0"]')
    card.click()
    assert texts(chromium, "#details h3") == [f"Stage 0: {factory.NASTY}"]
    assert texts(chromium, "#model-name") == [factory.NASTY]
    assert chromium.title != "owned"
    assert texts(chromium, "img") == []
    assert errors(chromium) == []


def test_an_injected_script_is_refused(chromium: Any, tmp_path: Path) -> None:
    """The policy holds even if a hole lets markup through."""
    plan, timeline = factory.two_towers()
    path = tmp_path / "r.html"
    page = render(plan, timeline).replace("<main>", "<main><script>window.hole = 1</script>")
    path.write_text(page, encoding="utf-8")
    chromium.get_log("browser")
    chromium.get(path.as_uri())
    assert chromium.execute_script("return window.hole") is None
    assert any("Content Security Policy" in message for message in errors(chromium))


def test_dark_mode_repaints(chromium: Any, tmp_path: Path) -> None:
    open_page(chromium, tmp_path / "r.html", *factory.two_towers())
    chromium.find_element("id", "theme-button").click()
    theme = chromium.execute_script("return document.documentElement.dataset.theme")
    assert theme == "dark"
    assert dark_share(chromium, 0, "--forward") > 0.01
    screenshot(chromium, "report-dark")


def test_it_prints(chromium: Any, tmp_path: Path) -> None:
    open_page(chromium, tmp_path / "r.html", *factory.two_towers(), comparison=ROWS)
    chromium.find_element("id", "theme-button").click()
    assert len(chromium.print_page()) > 20_000
    theme = chromium.execute_script("return document.documentElement.dataset.theme")
    assert theme == "dark", "printing uses light colours and gives the theme back"


@pytest.mark.timeout(300)
def test_64_devices_and_256_micro_batches(chromium: Any, tmp_path: Path) -> None:
    plan, timeline = factory.large()
    open_page(chromium, tmp_path / "r.html", plan, timeline)
    assert (tmp_path / "r.html").stat().st_size < 5_000_000
    assert len(texts(chromium, ".stage-card")) == 64
    assert len(texts(chromium, ".memory-card")) == 64
    chromium.find_element("id", "follow-sample").send_keys("500")
    assert texts(chromium, "#follow-status")[0].startswith("Following sample 500: 128 tasks")
    chromium.execute_script("GP.selection.pickStage(20)")
    assert texts(chromium, "#details h3") == ["Stage 20: encoder1.layers.5"]
    screenshot(chromium, "report-large")
    assert errors(chromium) == []
