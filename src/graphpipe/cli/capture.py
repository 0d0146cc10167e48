"""``graphpipe capture``."""

from __future__ import annotations

from typing import Annotated

import typer

from graphpipe.cli import options
from graphpipe.cli.command import command
from graphpipe.cli.output import Output


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    command(app, "capture")(capture)


def capture(
    output: Output,
    model: options.Model,
    show: Annotated[bool, typer.Option("--show", help="Print every operator.")] = False,
    split_joins: options.SplitJoins = False,
    out: options.Out = None,
) -> None:
    """Captures a model and its loss as a graph of operators; nothing is executed.

    The file can be planned for on a machine that has neither the model nor its code.

    \b
      graphpipe capture zoo:clip -o clip.json
      graphpipe capture my_model.py:job --show
      graphpipe plan clip.json --device a100-80gb --devices 16 -b 1024
    """
    from graphpipe.graph.split_joins import split_joins as split
    from graphpipe.programs.planning import capture_job, summary
    from graphpipe.zoo.load import load_job

    graph = capture_job(load_job(model))
    if split_joins:
        graph = split(graph)
    output.text(graph if show else summary(graph))
    for text in graph.warnings:
        output.note(f"Note: {text}")
    output.result(graph)
    if out is not None:
        graph.save(out)
        output.note(f"Wrote {out}.")
