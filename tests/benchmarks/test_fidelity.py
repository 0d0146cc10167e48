"""The parts of the fidelity benchmark that decide what it reports."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from graphpipe.simulate.timeline import Event, Timeline

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "fidelity.py"


@pytest.fixture(scope="module")
def fidelity() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fidelity", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fidelity"] = module
    spec.loader.exec_module(module)
    return module


def test_kept_memory_counts_once_and_parameters_and_inputs_apart(fidelity: ModuleType) -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    batch = torch.randn(100, 4)
    kept = fidelity.Kept([weight], [batch])
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
        rows = batch[10:13]
        hidden = torch.tanh(rows @ weight)  # keeps 3 rows of the input, and its own result
        loss = (hidden * hidden).sum()  # keeps the same result again
    assert kept.now == kept.peak == 3 * 4 * 4 + 3 * 4 * 4
    loss.backward()
    del loss, hidden
    assert kept.now == 0
    assert kept.peak == 96
    assert weight.grad is not None


def test_floor_is_the_first_pass_against_the_best_of_the_others(fidelity: ModuleType) -> None:
    assert fidelity._floor([1.0]) == 0.0
    assert fidelity._floor([1.1, 1.3, 1.0]) == pytest.approx(0.1)
    assert fidelity._floor([1.0, 1.2]) == pytest.approx(0.2)


def test_a_bound_is_the_target_or_twice_the_floor(fidelity: ModuleType) -> None:
    row = fidelity.Row
    rows = [
        row("m", "1", "stage", "s", 1.05, 1.0, 0.01),
        row("m", "1", "iteration", "", 1.15, 1.0, 0.08),
        row("m", "1", "activations", "rank 0", 106.0, 100.0, 0.2),
    ]
    assert fidelity.summary(rows) == [
        ("stage", pytest.approx(0.05), 0.01, 0.08, True),
        ("iteration", pytest.approx(0.15), 0.08, 0.16, True),
        ("activations", pytest.approx(0.06), 0.2, 0.05, False),
    ]
    table = fidelity.as_markdown(rows, ["Measured on a machine."])
    assert table.startswith("Measured on a machine.\n")
    assert "| m | 1 | stage s | 1050.00 ms | 1000.00 ms | 5.0% | 1.0% |" in table
    assert "| activations | 6.0% | 20.0% | 5.0% | no |" in table


def test_a_stage_takes_the_mean_over_its_later_micro_batches(fidelity: ModuleType) -> None:
    def event(kind: str, rank: int, number: int, start: int, end: int) -> Event:
        return Event(
            kind=kind,  # type: ignore[arg-type]
            rank=rank,
            stage=0,
            micro_batch=number,
            start_ns=start,
            end_ns=end,
        )

    events = (
        *(event("F", 0, 0, 0, 90), event("F", 0, 2, 100, 110), event("F", 0, 4, 110, 140)),
        event("F", 1, 1, 0, 50),
        event("B", 0, 0, 140, 147),
    )
    timeline = Timeline(world_size=2, iteration_ns=200, events=events)
    found = fidelity.mean_tasks(timeline)
    # The only micro-batch of rank 1 counts, the first of three on rank 0 does not.
    assert found[0, "F"] == pytest.approx((10 + 30 + 50) / 3 * 1e-9)
    assert found[0, "B"] == pytest.approx(7e-9)


def test_rows_of_other_models_are_kept_in_order(fidelity: ModuleType) -> None:
    def row(model: str, measured: float) -> Any:
        return fidelity.Row(model, "1", "iteration", "", 1.0, measured)

    before = [{**asdict(row(name, 2.0)), "error": 0.5} for name in ("t5", "mmt", "gpt2")]
    found = fidelity.merged(before, [row("t5", 4.0)])
    assert [(item.model, item.measured) for item in found] == [
        ("gpt2", 2.0),
        ("t5", 4.0),
        ("mmt", 2.0),
    ]
