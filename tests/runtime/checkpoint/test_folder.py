"""A checkpoint is whole or it is none; what is damaged is refused; old ones go."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from graphpipe.errors import CheckpointError
from graphpipe.runtime.checkpoint.engine import FolderWriter
from graphpipe.runtime.checkpoint.folder import (
    INDEX,
    MARKER,
    begin,
    complete_checkpoints,
    latest_checkpoint,
    locate,
)
from graphpipe.runtime.checkpoint.plain import export, load_state_dict, verify
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.runtime.state import FileState, ModelState
from tests.runtime.equality import adamw, example
from tests.runtime.manual import Part, manual_plan


def pipeline() -> Pipeline:
    made, graph = example("diamond")
    parts = [Part("stem", 6, (0,)), Part("a b cat", 6, (1,))]
    plan = manual_plan(graph, parts, batch_size=12)
    return Pipeline(made.model, plan, made.loss_fn, adamw, graph=graph, transport="in_process")


def step(pipe: Pipeline) -> None:
    made, _ = example("diamond")
    pipe.step(made.args, targets=made.targets)


def test_the_last_n_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    pipe = pipeline()
    assert latest_checkpoint(tmp_path / "none") is None
    for _ in range(4):
        step(pipe)
        path = pipe.save(tmp_path, keep=2).path
        assert latest_checkpoint(tmp_path) == path == locate(tmp_path)
    assert [item.name for item in complete_checkpoints(tmp_path)] == [
        "step-00000004",
        "step-00000003",
    ]
    # A step that is repeated after a failure: the newer one counts, the older one goes.
    again = pipe.save(tmp_path, keep=2).path
    assert again.name == "step-00000004.2"
    assert [item.name for item in complete_checkpoints(tmp_path)] == [
        "step-00000004.2",
        "step-00000003",
    ]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["step-00000003", "step-00000004.2"]


def test_a_save_that_did_not_end_is_none(tmp_path: Path) -> None:
    pipe = pipeline()
    good = pipe.save(tmp_path).path
    half = begin(tmp_path)
    shutil.copytree(good, half, dirs_exist_ok=True)
    assert complete_checkpoints(tmp_path) == [good]
    fake = tmp_path / "step-00000009"
    shutil.copytree(good, fake)
    (fake / MARKER).unlink()
    assert latest_checkpoint(tmp_path) == good
    with pytest.raises(CheckpointError, match=r"not complete.*step-00000009/COMPLETE"):
        pipe.load(fake)
    pipe.save(tmp_path)
    assert not half.exists()
    for item in complete_checkpoints(tmp_path):
        shutil.rmtree(item)
    with pytest.raises(CheckpointError, match="incomplete or damaged ones: step-00000009"):
        pipe.load(tmp_path)


@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(s, marks=pytest.mark.long) for s in range(3, 40))]
)
def test_killed_at_any_moment_the_previous_one_stays(tmp_path: Path, seed: int) -> None:
    pipe = pipeline()
    step(pipe)
    start = time.monotonic()
    first = pipe.save(tmp_path, data=1).path
    usual = time.monotonic() - start
    want = load_state_dict(first)
    step(pipe)
    child = os.fork()
    if child == 0:
        try:
            pipe.save(tmp_path, data=2, keep=1)
        finally:
            os._exit(0)
    time.sleep(random.Random(seed).random() * 1.2 * usual)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    newest = latest_checkpoint(tmp_path)
    assert newest is not None
    verify(newest)
    fresh = pipeline()
    position = fresh.load(tmp_path)
    assert position == (1 if newest == first else 2)
    assert fresh.iterations == position
    if newest == first:
        got = load_state_dict(tmp_path)
        assert all(torch.equal(got[name], value) for name, value in want.items())
    # And the next save is not disturbed by what was left.
    assert pipe.save(tmp_path, keep=1).path == latest_checkpoint(tmp_path)
    assert not [item for item in tmp_path.iterdir() if item.name.startswith(".")]


def _damage(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    match rng.randrange(4):
        case 0:
            path.write_bytes(data[: rng.randrange(len(data))])
            return "cut"
        case 1:
            path.unlink()
            return "gone"
        case 2:
            path.write_bytes(data + b"x")
            return "longer"
        case _:
            place = rng.randrange(len(data))
            data[place] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            return f"bit of byte {place}"


def test_every_damage_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    pipe = pipeline()
    step(pipe)
    good = pipe.save(tmp_path / "good", data=1).path
    step(pipe)
    before = pipe.state_dict()
    rng = random.Random(0)
    files = sorted(path.name for path in good.iterdir())
    assert len(files) == 4
    for number in range(60):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(good, copy)
        name = files[number % len(files)]
        how = _damage(copy / name, rng)
        with pytest.raises(CheckpointError) as caught:
            pipe.load(copy)
        assert str(copy) in str(caught.value), (name, how)
        with pytest.raises(CheckpointError):
            verify(copy)
        shutil.rmtree(copy)
    assert pipe.iterations == 2
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
    step(pipe)


def test_export_and_state_files(tmp_path: Path) -> None:
    pipe = pipeline()
    step(pipe)
    folder = pipe.save(tmp_path).path
    file = export(tmp_path, tmp_path / "model.safetensors")
    source = FileState(file, ModelState({}))
    for name, value in pipe.state_dict().items():
        assert torch.equal(source.tensor(name), value)
    # The model's files of a checkpoint are state files as they are.
    source = FileState(folder, ModelState({}))
    for name, value in pipe.state_dict().items():
        assert torch.equal(source.tensor(name), value)
    with pytest.raises(CheckpointError, match="Cannot write the file"):
        export(tmp_path, tmp_path / "no" / "such" / "folder")


def test_a_file_that_is_not_there_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipeline()
    good = pipe.save(tmp_path).path
    step(pipe)
    write = FolderWriter.write_data

    def elsewhere(self: FolderWriter, plan: Any, planner: Any) -> Any:
        """What the coordinator sees where the machines share no disk."""
        done = write(self, plan, planner)
        (Path(plan.storage_data) / "model-00000.safetensors").unlink()
        return done

    monkeypatch.setattr(FolderWriter, "write_data", elsewhere)
    with pytest.raises(CheckpointError, match=r"not in its folder.*model-00000.safetensors"):
        pipe.save(tmp_path, keep=1)
    assert list(tmp_path.iterdir()) == [good]


def test_checkpoints_of_a_training_that_was_left_are_set_aside(tmp_path: Path) -> None:
    pipe = pipeline()
    for _ in range(3):
        step(pipe)
        pipe.save(tmp_path)
    pipe.load(tmp_path / "step-00000001")
    step(pipe)
    with pytest.warns(UserWarning, match=r"step-00000003 is of another training.*step 2"):
        newest = pipe.save(tmp_path, data="again", keep=2).path
    names = [item.name for item in complete_checkpoints(tmp_path)]
    assert names == ["step-00000002.2", "step-00000001"]
    assert latest_checkpoint(tmp_path) == newest
    (aside,) = (item for item in tmp_path.iterdir() if item.name.startswith("set-aside-"))
    verify(aside)
    pipe.load(aside)
    assert pipe.iterations == 3


def test_a_marker_without_its_index_is_refused(tmp_path: Path) -> None:
    pipe = pipeline()
    folder = pipe.save(tmp_path).path
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"iterations":0', '"iterations":7'))
    with pytest.raises(CheckpointError, match="not the one that was saved"):
        pipe.load(folder)
    assert latest_checkpoint(tmp_path) is None


def test_an_index_cannot_make_us_set_memory_aside(tmp_path: Path) -> None:
    pipe = pipeline()
    step(pipe)
    folder = pipe.save(tmp_path).path
    text = (folder / INDEX).read_text()
    data = json.loads(text)
    huge = [2**30, 2**10]
    for entry in data["tensors"]:
        if entry["key"] == "exp_avg" and entry["name"] == "stem.bias":
            entry["shape"] = huge
            entry["chunks"][0].update(shape=huge, offsets=[0, 0])
    made = json.dumps(data).encode()
    (folder / INDEX).write_bytes(made)
    (folder / MARKER).write_text(hashlib.sha256(made).hexdigest())
    for read in (pipe.load, verify):
        with pytest.raises(CheckpointError, match=r"cannot hold stem.bias/exp_avg"):
            read(folder)
