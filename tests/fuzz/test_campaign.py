"""A short campaign of damaged files for the readers that have no test of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.campaign import FORMATS, campaign


@pytest.mark.parametrize("name", ["graph", "checkpoint", "plan"])
def test_damaged_files(name: str, tmp_path: Path) -> None:
    outcomes, fields = campaign(name, seed=0, count=150, folder=tmp_path)
    assert outcomes.total() == 150
    assert outcomes["refused"] + outcomes["accepted"] >= 0.3 * 150
    assert outcomes["refused"] >= 15
    assert len(fields) >= 15


@pytest.mark.campaign
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_many_thousand_damaged_files(name: str, tmp_path: Path) -> None:
    outcomes, _ = campaign(name, seed=1, count=10_000, folder=tmp_path)
    assert outcomes["refused"] + outcomes["accepted"] >= 0.3 * 10_000
