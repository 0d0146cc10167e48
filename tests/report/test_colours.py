"""Text of the report stands out from what it is on, in both themes (WCAG 2.2, level AA)."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

STYLE = (files("graphpipe.report") / "assets" / "report.css").read_text(encoding="utf-8")
TASKS = ("forward", "backward", "recompute", "all-reduce", "optimizer")
PAIRS = [(f"{task}-text", task) for task in TASKS] + [
    (text, ground)
    for text in ("text", "muted", "accent", "warn", "follow")
    for ground in ("card", "page")
]


def variables(selector: str) -> dict[str, str]:
    found = re.search(re.escape(selector) + r" \{(.*?)\n\}", STYLE, re.S)
    assert found is not None
    return dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", found[1]))


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [":root", ':root[data-theme="dark"]'])
@pytest.mark.parametrize(("text", "ground"), PAIRS)
def test_text_is_readable(theme: str, text: str, ground: str) -> None:
    colours = variables(theme)
    assert contrast(colours[text], colours[ground]) >= 4.5


@pytest.mark.parametrize("theme", [":root", ':root[data-theme="dark"]'])
def test_tasks_stand_out_from_idle_time(theme: str) -> None:
    colours = variables(theme)
    for task in ("forward", "all-reduce", "optimizer", "activations", "capacity"):
        assert contrast(colours[task], colours["idle"]) >= 2.5


def test_the_measure_is_right() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
