"""The command-line application: one command a module."""

from __future__ import annotations

from typing import Annotated

import typer

import graphpipe
from graphpipe.cli import (
    capture,
    checkpoint,
    cluster,
    compare,
    demo,
    doctor,
    emulate,
    explain,
    plan,
    profile,
    rendezvous,
    report,
    simulate,
    train,
)

app = typer.Typer(
    name="graphpipe",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    # Help reads better without frames, and the same on a terminal and in a pipe.
    rich_markup_mode=None,
)

for _module in (
    capture,
    profile,
    cluster,
    plan,
    explain,
    compare,
    simulate,
    emulate,
    report,
    train,
    checkpoint,
    rendezvous,
    demo,
    doctor,
):
    _module.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"graphpipe {graphpipe.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plans and trains PyTorch models as a graph of pipeline stages.

    Independent branches of a model become independent stages, which run side by side.
    A model is named zoo:NAME, or path/to/file.py:factory where the function "factory"
    returns a graphpipe.Job. Commands fit together by files:

    \b
      graphpipe plan zoo:mmt --device v100-16gb --devices 8 --batch-size 128 -o plan.json
      graphpipe simulate plan.json
      graphpipe train my_model.py:job --workers 4 --batch-size 64 --steps 300
      graphpipe demo
    """


def main() -> None:
    """Runs the command line of this process."""
    app()
