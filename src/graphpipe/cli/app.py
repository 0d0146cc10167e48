"""The command-line application: one sub-command a module."""

from __future__ import annotations

import typer

app = typer.Typer(
    name="graphpipe",
    help="Plan and train PyTorch models as a graph of pipeline stages.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    """Options of every command."""


def main() -> None:
    """Runs the command line of this process."""
    app()
