"""The public names: where they come from, and that importing them late keeps import quick."""

from __future__ import annotations

import subprocess
import sys

import pytest

import graphpipe


@pytest.mark.parametrize("name", [name for name in graphpipe.__all__ if name != "Job"])
def test_public_name_resolves(name: str) -> None:
    assert callable(getattr(graphpipe, name))


def test_every_public_name_has_a_home_and_the_reverse() -> None:
    assert {*graphpipe._HOME, "GraphPipeError"} == set(graphpipe.__all__)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        graphpipe.nonsense  # noqa: B018


def test_functions_win_over_the_packages_of_the_same_name() -> None:
    code = """
import graphpipe
import graphpipe.plan.plan, graphpipe.simulate.timeline
from graphpipe import plan, simulate
assert graphpipe.plan is plan and plan.__name__ == "plan", plan
assert graphpipe.simulate is simulate and simulate.__name__ == "simulate", simulate
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_does_not_load_torch() -> None:
    code = "import sys, graphpipe; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
