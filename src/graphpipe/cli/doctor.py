"""``graphpipe doctor``."""

from __future__ import annotations

import typer

from graphpipe.cli.command import command
from graphpipe.cli.output import Output


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    command(app, "doctor")(doctor)


def doctor(output: Output) -> None:
    """Checks the installation: Python, packages, torch, back-ends and devices.

    Says what to do about everything that is missing. The exit code is 1 if training would
    fail.

    \b
      graphpipe doctor
      graphpipe doctor --json
    """
    from graphpipe.programs.doctor import examine

    findings = list(examine())
    output.table(
        "",
        ("check", "state", "found", "what to do"),
        [(item.check, item.state, item.found, item.fix) for item in findings],
    )
    output.result([item.as_dict() for item in findings])
    failed = [item for item in findings if item.state == "error"]
    if failed:
        output.note(f"{len(failed)} of {len(findings)} checks failed.")
        raise typer.Exit(1)
    output.text("Everything that training needs is there.")
