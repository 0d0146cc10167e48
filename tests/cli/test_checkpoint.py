"""``graphpipe train --save --resume`` and ``graphpipe checkpoint``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.helpers import Files, fail, run, run_json

TRAIN = ("--optimizer", "adamw", "--lr", 0.01)


def test_training_in_parts_is_training_at_once(files: Files, tmp_path: Path) -> None:
    whole = run_json("train", files.model, "--workers", 2, "--steps", 12, *TRAIN)["losses"]
    folder, history = tmp_path / "checkpoints", tmp_path / "history.jsonl"
    words = (
        "--save", folder, "--save-every", 2, "--keep", 2, "--resume", "--history", history, *TRAIN,
    )  # fmt: skip
    first = run_json("train", files.model, "--workers", 2, "--steps", 7, *words)["losses"]
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000006", "step-00000007"]
    # 7 steps are one epoch of 5 mini-batches and 2 of the next; 3 workers make another plan.
    second = run_json("train", files.model, "--workers", 3, "--steps", 12, *words)["losses"]
    assert first + second == pytest.approx(whole, rel=1e-5)
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["workers"] for line in lines] == [2] * 7 + [3] * 5
    again = run("train", files.model, "--workers", 2, "--steps", 12, *words)
    assert "All steps had been taken" in again.stdout

    shown = run_json("checkpoint", "show", folder)
    assert shown["iterations"] == 12
    assert shown["optimizer"] == "AdamW"
    assert "left.0.weight" in shown["tensors"]
    assert "12 mini-batches trained by 3 ranks" in run("checkpoint", "show", folder).stdout
    assert "all as they were saved" in run("checkpoint", "verify", folder).stdout
    out = tmp_path / "model.safetensors"
    run("checkpoint", "export", folder, "-o", out)
    assert load_file(out).keys() == shown["tensors"].keys()

    for file in (folder / "step-00000012").glob("model-*"):
        file.write_bytes(file.read_bytes()[:-1])
    assert "damaged" in fail("checkpoint", "verify", folder)
    assert "no such folder" in fail("checkpoint", "show", tmp_path / "none")
    assert "--save DIR" in fail("train", files.model, "--resume")
