"""Naming a job: the zoo, a file, and every way of naming it wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from graphpipe.errors import InputError
from graphpipe.zoo.job import Job
from graphpipe.zoo.load import load_job

FILE = """
import torch
from torch import nn
from graphpipe import Job
from helper_beside import WIDTH

def factory():
    return Job(lambda: nn.Linear(WIDTH, 1), (torch.zeros(2, WIDTH),), name="mine")

ready = factory()

def wrong():
    return 3

def broken():
    raise KeyError("nothing here")
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    (tmp_path / "helper_beside.py").write_text("WIDTH = 3\n")
    path = tmp_path / "user_model.py"
    path.write_text(FILE)
    return path


def test_zoo_name() -> None:
    assert load_job("zoo:mmt-tiny").name == "mmt-tiny"


@pytest.mark.parametrize("what", ["factory", "ready"])
def test_function_or_job_of_a_file(user_file: Path, what: str) -> None:
    before = list(sys.path)
    job = load_job(f"{user_file}:{what}")
    assert isinstance(job, Job)
    assert job.name == "mine"
    assert sys.path == before


def test_a_file_is_run_once(tmp_path: Path) -> None:
    path = tmp_path / "counted.py"
    path.write_text(
        "from graphpipe import Job\nfrom torch import nn\n"
        "open(__file__ + '.log', 'a').write('run ')\njob = Job(nn.Linear(1, 1))\n"
    )
    assert load_job(f"{path}:job") is load_job(f"{path}:job")
    assert Path(f"{path}.log").read_text() == "run "


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mmt", ["not the name of a model", "zoo:NAME", "file.py:factory"]),
        ("zoo:", ["not the name of a model"]),
        ("zoo:mmt-tini", ["no model of this name", "Did you mean zoo:mmt-tiny", "candle-uno"]),
        ("zoo:xyzzy", ["no model of this name", "Name a model as zoo:NAME"]),
        ("/nowhere/model.py:build", ["no such Python file", "/nowhere/model.py"]),
    ],
)
def test_wrong_name(name: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        load_job(name)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing", ["no function 'missing'", "broken, factory, wrong", "user_model.py"]),
        ("wrong", ["something else than a job", "graphpipe.Job(", "got int"]),
        ("broken", ["failed with KeyError: 'nothing here'", "user_model.py:broken"]),
    ],
)
def test_wrong_factory(user_file: Path, what: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        load_job(f"{user_file}:{what}")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("import not_installed_anywhere", "ModuleNotFoundError"),
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit"),
    ],
)
def test_file_that_fails_is_named_and_not_remembered(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "fails.py"
    path.write_text(text)
    with pytest.raises(InputError, match=f"The file failed with {word}") as caught:
        load_job(f"{path}:build")
    assert "fails.py" in str(caught.value)
    assert "graphpipe_user_fails" not in sys.modules


def test_naming_the_zoo_runs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zoo.py").write_text("raise RuntimeError('must not run')")
    monkeypatch.chdir(tmp_path)
    assert load_job("zoo:digits").name == "digits"
