"""The comparison table: one row a planner, the same input for all, honest about limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphpipe.errors import PlanError
from graphpipe.graph.model_graph import LossTerm, ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.plan.validate import validate
from graphpipe.planner import compare as module
from graphpipe.planner.compare import (
    CHAIN,
    OURS,
    PLANNERS,
    Comparison,
    ComparisonRow,
    Hopeless,
    compare,
    with_ratios,
)
from graphpipe.planner.search import plan
from tests.planner.synthetic import cluster_of, towers

_CLUSTER = cluster_of(5, bandwidth=1e10, latency=1e-5)


def test_every_planner_has_a_row_with_the_figures_of_its_plan() -> None:
    file = towers(3, 2, 2)
    found = compare(file.graph, file.costs, _CLUSTER, 16)
    assert [item.row.planner for item in found] == list(PLANNERS)
    bound = found[0].row.lower_bound_ns
    for row, best, units in found:
        assert len(units) == row.units
        assert best is not None
        validate(best, file.graph)
        assert row.iteration_ns is not None
        assert row.iteration_ns >= bound == row.lower_bound_ns
        assert row.throughput == pytest.approx(16e9 / row.iteration_ns)
        assert row.stages == len(best.stages)
        assert row.search_seconds is not None
        assert row.ratio == pytest.approx(row.iteration_ns / found[0].row.iteration_ns)
        assert row.lower_bound_gap == pytest.approx(row.iteration_ns / bound - 1)
        assert not row.fused
        assert row.note == ""
    parts = found[0].row.gap_parts
    total = sum(value for name, value in parts.items() if name not in ("total", "bound_over_work"))
    assert total - parts["bound_over_work"] == pytest.approx(parts["total"])
    assert {row.variant for row, _, _ in found} == {"ours", "all freedoms", "as published"}


def test_ours_is_never_behind_the_others_on_towers() -> None:
    for branches, layers, trunk in ((4, 2, 1), (3, 3, 3), (2, 5, 2)):
        file = towers(branches, layers, trunk)
        for row, _, _ in compare(file.graph, file.costs, _CLUSTER, 20):
            assert row.ratio is not None
            assert row.ratio >= 1.0 - 1e-9, row.planner


def test_only_the_planners_asked_for_run_and_ours() -> None:
    file = towers(2, 1, 1)
    seen: list[str] = []
    found = compare(
        file.graph, file.costs, _CLUSTER, 8, planners=["1f1b", CHAIN], progress=seen.append
    )
    assert [item.row.planner for item in found] == seen == [OURS, CHAIN, "1f1b"]


def test_an_unknown_planner_is_named() -> None:
    file = towers(2, 1, 1)
    with pytest.raises(PlanError, match=r"pipedream.*'alpa'"):
        compare(file.graph, file.costs, _CLUSTER, 8, planners=["alpa"])


def test_a_baseline_that_refuses_the_graph_gets_a_fused_one_and_says_so() -> None:
    file = towers(6, 6, 1)
    known = Hopeless()
    found = compare(
        file.graph, file.costs, cluster_of(3), 4, planners=["piper"], time_limit=0.3, hopeless=known
    )
    row = found[-1].row
    assert row.fused
    assert row.units < found[0].row.units
    assert "down-sets" in row.note
    assert row.iteration_ns is not None
    assert "down-sets" in str(known("piper", file.graph.name, 0, 3))


def test_without_memory_the_row_says_why_there_is_no_plan() -> None:
    file = towers(1, 4, 0)
    # One device holds the parameters of one layer and a little.
    cluster = cluster_of(4, memory_bytes=16e6 + 4e6, bandwidth=1e10)
    found = {item.row.planner: item for item in compare(file.graph, file.costs, cluster, 4)}
    lacking = found["data-parallel"]
    assert lacking.plan is None
    assert lacking.row.iteration_ns is None
    assert "memory" in lacking.row.note
    assert found[OURS].plan is not None


def test_what_did_not_end_is_not_tried_with_more_devices() -> None:
    known = Hopeless()
    known.note("piper", "g", 2000, 16, "took too long")
    known.note("piper", "g", 2000, 8, "took too long")
    known.note("piper", "g", 2000, 32, "never heard")
    assert known("piper", "g", 2000, 4) is None
    assert known("piper", "g", 2000, 8) == "took too long"
    assert known("piper", "g", 2000, 16) == "took too long (for 8 devices)"
    assert known("pipedream", "g", 2000, 16) is None


def test_rows_are_kept_as_they_are_found() -> None:
    file = towers(2, 1, 1)
    kept: list[ComparisonRow] = []
    names = ("1f1b", "gpipe")
    found = compare(
        file.graph, file.costs, _CLUSTER, 8, planners=names, keep=lambda c: kept.append(c.row)
    )
    assert kept == [item.row for item in found]
    assert all(row.ratio is not None for row in kept)


def test_ratios_are_to_ours_on_the_same_input() -> None:
    def row(planner: str, devices: int, ns: int | None) -> ComparisonRow:
        return ComparisonRow(
            model="m",
            planner=planner,
            variant="ours" if planner == OURS else "as published",
            devices=devices,
            batch_size=8,
            memory_bytes=1,
            units=1,
            iteration_ns=ns,
        )

    rows = [row("1f1b", 2, 30), row(OURS, 2, 20), row(OURS, 4, 10), row("1f1b", 4, None)]
    assert [each.ratio for each in with_ratios(rows)] == [1.5, 1.0, 1.0, None]
    assert with_ratios([row("1f1b", 2, 30)])[0].ratio is None


def test_a_loss_over_the_whole_mini_batch_is_pointed_out() -> None:
    file = towers(2, 1, 1)
    fields = {name: getattr(file.graph, name) for name in ModelGraph.model_fields}
    last = fields["ops"][-1]
    fields["ops"] = (*fields["ops"][:-1], last.model_copy(update={"coupled": True}))
    fields["loss_terms"] = (LossTerm(op=last.name, reduction="coupled"),)
    graph = ModelGraph(**fields)
    costs = replace(file.costs, fingerprint=graph.fingerprint)
    ours, theirs = compare(graph, costs, cluster_of(3, bandwidth=1e10), 8, planners=["1f1b"])
    assert ours.row.note == ""
    assert 8 in ours.row.micro_batches
    assert "follows the micro-batch" in theirs.row.note


def test_rows_are_a_file(tmp_path: Path) -> None:
    row = ComparisonRow(
        model="m", planner=OURS, variant="ours", devices=2, batch_size=4, memory_bytes=1, units=3
    )
    Comparison(rows=(row,)).save(tmp_path / "rows.json")
    assert Comparison.load(tmp_path / "rows.json").rows == (row,)


def test_an_interrupted_search_of_ours_is_kept_and_ends_the_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Our search answers an interrupt with its best plan, which says so."""

    def interrupted(*args: Any, **kwargs: Any) -> Plan:
        found = plan(*args, **kwargs)
        return found.model_copy(update={"notes": ("The search was interrupted: so far.",)})

    monkeypatch.setattr(module, "plan", interrupted)
    file = towers(2, 1, 1)
    kept: list[ComparisonRow] = []
    with pytest.raises(KeyboardInterrupt):
        compare(file.graph, file.costs, _CLUSTER, 8, keep=lambda c: kept.append(c.row))
    assert [row.planner for row in kept] == [OURS]
    assert "interrupted" in kept[0].note
    assert kept[0].iteration_ns is not None
