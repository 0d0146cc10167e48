"""Chrome traces: what Perfetto needs, complete and in its units."""

from __future__ import annotations

import json
from pathlib import Path

from graphpipe.report.chrome_trace import chrome_trace, write_chrome_trace
from graphpipe.simulate.simulator import simulate
from tests.simulate.test_simulator import chain_plan


def test_tasks_are_slices_and_messages_are_arrows() -> None:
    timeline = simulate(chain_plan(optimizer_ns=(5, 9)), network="channel")
    trace = chrome_trace(timeline)
    events = trace["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(timeline.events)
    first = next(e for e in slices if e["name"] == "F1.0 s1")
    assert (first["tid"], first["ts"], first["dur"]) == (1, 0.022, 0.010)
    assert first["args"] == {"what": "forward", "stage": 1, "micro_batch": 0}
    assert {e["cat"] for e in slices} == {"forward", "backward", "optimizer"}
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    stops = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == len(timeline.transfers) == 4
    assert starts.keys() == stops.keys()
    for number, transfer in enumerate(timeline.transfers):
        start, stop = starts[f"0.{number}"], stops[f"0.{number}"]
        assert (start["tid"], stop["tid"]) == (transfer.source, transfer.target)
        assert start["ts"] * 1000 == transfer.start_ns
        assert stop["args"]["bytes"] == transfer.nbytes
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"predicted (channel)", "rank 0", "rank 1"}


def test_several_timelines_are_processes_of_one_file(tmp_path: Path) -> None:
    predicted = simulate(chain_plan())
    measured = predicted.model_copy(update={"network": "measured", "stage_names": ()})
    path = tmp_path / "trace.json"
    write_chrome_trace(path, predicted, measured)
    trace = json.loads(path.read_text())
    names = {
        e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"
    }
    assert names == {0: "predicted (shared)", 1: "measured"}
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 1]
    assert any(e["name"] == "B0.1 stage 0" for e in slices)
    assert list(tmp_path.iterdir()) == [path]
