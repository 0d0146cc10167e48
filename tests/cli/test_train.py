"""``graphpipe train``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.helpers import Files, fail, run, run_json


def test_training_by_a_plan(files: Files, tmp_path: Path) -> None:
    out, trace = tmp_path / "w.safetensors", tmp_path / "trace.json"
    words = ("--plan", files.plan, "--steps", 6, "--optimizer", "sgd", "--lr", 0.05)
    result = run("train", files.model, *words, "-o", out, "--trace", trace)
    assert "6 steps of 8 samples in" in result.stdout
    assert "left.0.weight" in load_file(out)
    assert any(event["ph"] == "X" for event in json.loads(trace.read_text())["traceEvents"])


def test_one_epoch_by_default_and_json(files: Files) -> None:
    losses = run_json("train", files.model, "--workers", 2)["losses"]
    assert len(losses) == 5


def test_torchrun_equals_own_workers(files: Files) -> None:
    words = ["train", files.model, "--plan", str(files.plan), "--steps", "3", "--json"]
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*start, "-m", "graphpipe", *words],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["losses"] == pytest.approx(
        run_json(*words[:-1])["losses"], abs=1e-6
    )


def test_wrong_use(files: Files, tmp_path: Path) -> None:
    assert "Unknown optimizer" in fail("train", files.model, "--optimizer", "lion")
    assert "Cannot read the graphpipe-plan" in fail("train", files.model, "--plan", "nowhere.json")
