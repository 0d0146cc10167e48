"""Every code block of the documentation runs, or where it needs a cluster is at least valid."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from graphpipe.cli.app import app
from tests.docs.pages import DOCS, Block, blocks, name, pages_with


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", pages_with("python"), ids=name)
def test_python_blocks_run_in_order(page: Path) -> None:
    namespace: dict[str, object] = {"__name__": "documentation"}
    for block in blocks(page, "python"):
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        needs = re.findall(r"^# needs: (\S+)$", block.text, re.M)
        if all(importlib.util.find_spec(package) for package in needs):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                exec(code, namespace)


@pytest.mark.parametrize("page", pages_with("console"), ids=name)
def test_console_blocks_run(page: Path) -> None:
    for block in blocks(page, "console"):
        for command in re.findall(r"^\$ (.*)$", block.text, re.M):
            program, *arguments = shlex.split(command)
            assert program == "graphpipe", f"{page}: {command}"
            done = CliRunner().invoke(app, arguments)
            assert done.exit_code == 0, f"{page}: {command}\n{done.output}\n{done.exception!r}"


@pytest.mark.long
def test_the_script_for_several_nodes_trains_under_torchrun() -> None:
    script, plan, *_ = blocks(DOCS / "several-nodes.md", "python")
    Path("train.py").write_text(script.text, encoding="utf-8")
    exec(script.text + plan.text, {"__name__": "documentation"})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "train.py", "--plan", "plan.json", "--steps", "31"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2
    assert Path("model.pt").exists()
    assert (
        CliRunner().invoke(app, ["report", "plan.json", "--trace", "measured.json"]).exit_code == 0
    )


def shell_blocks() -> list[Block]:
    return [block for page in pages_with("bash") for block in blocks(page, "bash")]


def test_shell_scripts_are_valid() -> None:
    for block in shell_blocks():
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
        assert done.returncode == 0, f"{block.page}:{block.line}: {done.stderr}"


def test_commands_and_options_in_shell_scripts_exist() -> None:
    root = typer.main.get_command(app)
    for block in shell_blocks():
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            where = f"{block.page}:{block.line}: {line}"
            if "graphpipe" in words and (words[0] == "graphpipe" or "--module" in words):
                check_command(root, words[words.index("graphpipe") + 1 :], where)


def check_command(command: Any, words: list[str], where: str) -> None:
    while hasattr(command, "commands"):
        found = command.commands.get(words[0]) if words else None
        assert found is not None, f"{where}: no such command"
        command, words = found, words[1:]
    known = {option for parameter in command.params for option in parameter.opts}
    for word in words:
        if word.startswith("-"):
            assert word.split("=")[0] in known, f"{where}: no option {word}"


def test_a_wrong_command_or_option_is_found() -> None:
    root = typer.main.get_command(app)
    with pytest.raises(AssertionError, match="no such command"):
        check_command(root, ["plam"], "here")
    with pytest.raises(AssertionError, match="no option --devises"):
        check_command(root, ["plan", "zoo:mmt", "--devises", "4"], "here")


def test_toml_and_yaml_are_valid() -> None:
    for page in pages_with("toml"):
        for block in blocks(page, "toml"):
            tomllib.loads(block.text)
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the tools of the documentation")
    for page in pages_with("yaml"):
        for block in blocks(page, "yaml"):
            assert yaml.safe_load(block.text)
