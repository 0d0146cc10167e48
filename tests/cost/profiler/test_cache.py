"""Profiles in files: used while they fit, measured again with a notice otherwise."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from graphpipe.cost.analytic import estimate
from graphpipe.cost.profiler.cache import load_or_profile
from graphpipe.cost.profiler.measure import Budget
from graphpipe.cost.table import CostTable
from tests.cost.profiler.model import hard_graph

OPTIONS = {"micro_batches": [2], "budget": Budget(0.0, 2, 2), "correction_seconds": 0}


def test_a_fitting_profile_is_used_again(tmp_path: Path) -> None:
    path, said = tmp_path / "p.json", []
    first = load_or_profile(hard_graph(), path, notice=said.append, **OPTIONS)
    again = load_or_profile(hard_graph(), path, notice=said.append, **OPTIONS)
    assert said == []
    assert (
        again.op_seconds("cpu-core", 2)[0].tolist() == first.op_seconds("cpu-core", 2)[0].tolist()
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": "0"}, "another graph"),
        ({"torch_version": "1.0"}, "another version of torch"),
        ({"hosts": {"cpu-core": "abacus"}}, "other hardware"),
        ({"micro_batches": (3,)}, "other micro-batch sizes"),
        ({"source": "analytic"}, "not measured"),
        ({"optimizer": "sgd"}, "another optimizer"),
        ({"precision": "bf16-mixed"}, "another precision"),
    ],
)
def test_a_stale_profile_is_measured_again_with_a_notice(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    path, said = tmp_path / "p.json", []
    fresh = load_or_profile(hard_graph(), path, **OPTIONS)
    dataclasses.replace(fresh, **change).save(path)  # type: ignore[arg-type]
    again = load_or_profile(hard_graph(), path, notice=said.append, **OPTIONS)
    assert reason in said[0]
    again.check(hard_graph())
    assert CostTable.load(path).hosts == fresh.hosts


def test_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    path, said = tmp_path / "p.json", []
    path.write_text("{", encoding="utf-8")
    load_or_profile(hard_graph(), path, notice=said.append, **OPTIONS)
    assert len(said) == 1
    assert CostTable.load(path).source == "profiled"
    estimate(hard_graph(), "cpu-core").check(hard_graph())
