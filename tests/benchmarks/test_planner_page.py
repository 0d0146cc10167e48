"""The page of the planner's benchmark says what its rows say, and what is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from graphpipe.planner.compare import ComparisonRow, with_ratios

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "planner_page.py"
MEMORY = 16 * 10**9


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("planner_page", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _row(planner: str, ms: float | None, **fields: object) -> ComparisonRow:
    given = {
        "model": "m",
        "planner": planner,
        "variant": {"gpp": "ours", "chain": "all freedoms"}.get(planner, "as published"),
        "devices": 4,
        "batch_size": 64,
        "memory_bytes": MEMORY,
        "units": 9,
        "search_seconds": 0.5,
        "iteration_ns": None if ms is None else round(ms * 1e6),
        "lower_bound_ns": 10_000_000,
    }
    return ComparisonRow.model_validate({**given, **fields})


def test_both_columns_of_ratio_and_what_was_not_run(pages: ModuleType) -> None:
    rows = with_ratios(
        [
            _row("gpp", 20.0),
            _row("chain", 22.0),
            _row("pipedream", 30.0, fused=True),
            _row("piper", None),
            _row("1f1b", 25.0),
        ]
    )
    wanted = [("m", 4, 64, MEMORY), ("m", 8, 128, MEMORY)]
    text = pages.page(rows, "the command", wanted, ["A remark."])
    assert "Made by `the command`" in text
    assert "A remark." in text
    cells = next(line for line in text.splitlines() if line.startswith("| 4 | 64 |"))
    assert cells.endswith("| 1.25 | 1.10 | 1.50* | - | 1.25 |")
    assert "gpp 1, chain 1, pipedream 1, piper 1, graphpipe-paper 2" in text
    assert "No row at all: m on 8 devices, B = 128, 16 GB." in text
    assert "- chain: x1.100 (m, 4 devices, B = 64, 16 GB) to x1.100" in text
    assert "below 1 in 0 of 1 cells" in text


def test_a_loss_is_counted(pages: ModuleType) -> None:
    rows = with_ratios([_row("gpp", 20.0), _row("1f1b", 19.0)])
    assert "1f1b: x0.950" in pages.summary(rows)
    assert "below 1 in 1 of 1 cells" in pages.summary(rows)


def test_rows_take_the_newest_bound(pages: ModuleType) -> None:
    old = _row("1f1b", 30.0, lower_bound_ns=5_000_000, lower_bound_gap=5.0)
    ours, theirs = pages.with_bound_of_ours([_row("gpp", 20.0, binding="way"), old])
    assert (ours.lower_bound_gap, theirs.lower_bound_gap) == (1.0, 2.0)
    assert theirs.binding == "way"


def test_search_times_on_the_identical_graph(pages: ModuleType) -> None:
    rows = [
        _row("gpp", 20.0, variant="search: piper, graph as it is", search_seconds=0.9, units=44),
        _row(
            "piper",
            30.0,
            variant="search: piper",
            search_seconds=50.0,
            longest_seconds=5.0,
            fused=True,
            down_sets=1234,
            note="refuses the graph: more than 40000 down-sets; 9 units after fusing",
        ),
        _row("gpp", 21.0, variant="search: piper", search_seconds=0.5),
    ]
    text = pages.page(rows, "c", [])
    assert "| 44 | more than 1,000,000 | refuses the graph: more than 40000 down-sets |" in text
    assert "| 9 (fused) | 1,234 | 50.0 s | 5.00 s | 0.50 s | 100.0 | 10.0 |" in text
