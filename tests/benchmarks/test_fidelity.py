"""The parts of the fidelity benchmark that decide what it reports."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

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
    table = fidelity.as_markdown(rows, "a machine")
    assert "| m | 1 | stage s | 1050.00 ms | 1000.00 ms | 5.0% | 1.0% |" in table
    assert "| activations | 6.0% | 20.0% | 5.0% | no |" in table
