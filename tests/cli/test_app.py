"""The application: every command has a help worth reading."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import graphpipe
from graphpipe.cli.app import app

COMMANDS = (
    "capture", "profile", "plan", "explain", "compare", "simulate", "emulate", "train", "report",
    "demo", "doctor", "cluster probe", "cluster show", "cluster devices", "rendezvous",
    "checkpoint show", "checkpoint verify", "checkpoint export",
)  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_and_describes_every_option(name: str) -> None:
    result = CliRunner().invoke(app, [*name.split(), "--help"])
    assert result.exit_code == 0
    assert f"  {'torchrun' if name == 'cluster probe' else f'graphpipe {name}'}" in result.stdout
    for option in ("--json", "--quiet", "--debug"):
        assert option in result.stdout
    command = typer.main.get_command(app)
    for word in name.split():
        command = command.commands[word]  # type: ignore[attr-defined]
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{name}: {parameter.name} has no help"


def test_all_commands_are_tested() -> None:
    root = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {name.split()[0] for name in COMMANDS} == set(root)


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.stdout == f"graphpipe {graphpipe.__version__}\n"


def test_starts_as_a_module_and_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['graphpipe', '--help']\n"
        "import runpy\n"
        "try: runpy.run_module('graphpipe', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Plans and trains PyTorch models" in done.stdout
