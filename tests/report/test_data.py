from __future__ import annotations

import json
from itertools import accumulate
from typing import Any

from graphpipe.planner.compare import ComparisonRow
from graphpipe.report.data import EVENT_KINDS, report_data
from tests.report import factory


def test_columns_decode_to_the_events() -> None:
    plan, timeline = factory.two_towers()
    columns = report_data(plan, timeline, None, ())["timelines"][0]["events"]
    reached, decoded = 0, []
    for rank, kind, stage, micro_batch, gap, length in zip(
        accumulate(columns["rank"]), columns["kind"], columns["stage"], columns["micro_batch"],
        columns["gap"], columns["length"], strict=True,
    ):  # fmt: skip
        start = reached + gap
        reached = start + length
        decoded.append((rank, EVENT_KINDS[kind], start, reached, stage, micro_batch))
    events = [
        (e.rank, e.kind, e.start_ns, e.end_ns, e.stage, e.micro_batch) for e in timeline.events
    ]
    assert sorted(decoded) == sorted(events)


def test_transfers_decode_likewise() -> None:
    plan, timeline = factory.two_towers()
    columns = report_data(plan, timeline, None, ())["timelines"][0]["transfers"]
    starts = list(accumulate(columns["start"]))
    decoded = [
        (start, start + length, nbytes, first, first + samples - 1)
        for start, length, nbytes, first, samples in zip(
            starts, columns["length"], columns["bytes"], columns["first_sample"],
            columns["samples"], strict=True,
        )
    ]  # fmt: skip
    assert sorted(decoded) == sorted(
        (t.start_ns, t.end_ns, t.nbytes, t.first_sample, t.last_sample) for t in timeline.transfers
    )


def test_memory_decodes_to_steps_whose_maximum_is_the_peak() -> None:
    plan, timeline = factory.two_towers()
    memory = report_data(plan, timeline, None, ())["timelines"][0]["memory"]
    assert len(memory) == plan.world_size
    for rank, steps in enumerate(memory):
        levels = list(accumulate(steps["bytes"]))
        assert levels[0] == plan.static_bytes(rank)
        assert max(levels) == timeline.peak_memory[rank]


def test_what_the_analysis_finds_agrees_with_the_plans_prediction() -> None:
    plan, timeline = factory.two_towers()
    data = report_data(plan, timeline, None, ())
    assert plan.prediction is not None
    shown = data["timelines"][0]
    assert abs(shown["bubble"] - plan.prediction.bubble) < 1e-12
    assert shown["uses"][shown["bottleneck"]]["busy_ns"] == plan.prediction.bottleneck_ns
    assert data["depth"] == plan.prediction.depth


def test_a_measured_timeline_is_the_second_and_has_no_memory() -> None:
    plan, timeline = factory.two_towers()
    data = report_data(plan, timeline, factory.measured_of(timeline), ())
    assert [each["label"] for each in data["timelines"]] == ["Predicted", "Measured"]
    assert data["timelines"][1]["memory"] == []
    assert len(data["words_measured"]) == 3


def test_an_emulated_timeline_is_called_so() -> None:
    plan, timeline = factory.two_towers()
    emulated = timeline.model_copy(update={"network": "channel"})
    data = report_data(plan, timeline, emulated, ())
    assert [each["label"] for each in data["timelines"]] == ["Predicted", "Emulated"]
    assert ", emulated " in data["words_measured"][0]


def test_edges_sum_their_tensors_and_the_depth_is_the_longest_path() -> None:
    plan, timeline = factory.two_towers()
    data = report_data(plan, timeline, None, ())
    assert data["edges"][0]["bytes_per_sample"] == 2048.0
    assert data["depth"] == 3


def test_it_is_json_without_infinities() -> None:
    plan, timeline = factory.two_towers()
    rows = (row("piper", "as published", note="none found"),)
    text = json.dumps(report_data(plan, timeline, None, rows), allow_nan=False)
    assert '"piper"' in text


def row(planner: str, variant: str, **more: Any) -> ComparisonRow:
    size = {"model": "m", "devices": 7, "batch_size": 32, "memory_bytes": 1, "units": 5}
    return ComparisonRow.model_validate({"planner": planner, "variant": variant, **size, **more})


def test_the_plan_shown_is_not_compared_with_itself() -> None:
    plan, timeline = factory.two_towers()
    rows = (
        row("gpp", "ours", iteration_ns=timeline.iteration_ns),
        row("chain", "all freedoms", iteration_ns=timeline.iteration_ns),
    )
    shown = report_data(plan, timeline, None, rows)["comparison"]
    assert [each["planner"] for each in shown] == ["chain"]
