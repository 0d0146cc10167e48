"""What all commands share: options, exit codes, errors in one paragraph."""

from __future__ import annotations

from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from graphpipe.cli.command import command
from graphpipe.cli.output import Output
from graphpipe.errors import PlanError


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None)

    def work(output: Output, how: Annotated[str, typer.Argument(help="What happens.")]) -> None:
        """Does some work."""
        if how == "plan":
            raise PlanError(
                "An op is missing", where="stage 1", expected="3", got="2", fix="Plan\nagain"
            )
        if how == "own":
            raise ZeroDivisionError("division by zero")
        if how == "interrupt":
            raise KeyboardInterrupt
        output.text(f"worked {how}")
        output.result({"how": how})

    command(app, "work")(work)
    command(app, "other")(work)
    return app


def test_success(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["work", "well"])
    assert (result.exit_code, result.stdout) == (0, "worked well\n")
    result = CliRunner().invoke(app, ["work", "well", "--json"])
    assert (result.exit_code, result.stdout) == (0, '{\n "how": "well"\n}\n')


def test_error_is_one_paragraph(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["work", "plan"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "Error: An op is missing (at stage 1). Expected 3, got 2. Plan again.\n"


def test_error_of_another_kind_says_how_to_see_more(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["work", "own"])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ZeroDivisionError: division by zero.")
    assert "--debug" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("how", ["plan", "own"])
def test_debug_shows_the_traceback(app: typer.Typer, how: str) -> None:
    result = CliRunner().invoke(app, ["work", how, "--debug"])
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "test_command.py" in result.stderr


def test_interruption(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["work", "interrupt"])
    assert result.exit_code == 130
    assert result.stderr == "Interrupted.\n"


def test_wrong_command_line(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["work", "well", "--nonsense"])
    assert result.exit_code == 2
    assert "No such option: --nonsense" in result.stderr


def test_help_lists_own_and_common_options(app: typer.Typer) -> None:
    text = CliRunner().invoke(app, ["work", "--help"]).stdout
    for word in ("Does some work.", "What happens.", "--json", "--quiet", "--debug"):
        assert word in text
