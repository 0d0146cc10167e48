"""``graphpipe explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphpipe.cli import options
from graphpipe.cli.command import command
from graphpipe.cli.output import Output


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    command(app, "explain")(explain)


def explain(
    output: Output,
    plan: options.PlanFile,
    graph: Annotated[
        Path | None,
        typer.Option("--graph", help="Its captured graph, to decompose the gap to the bound."),
    ] = None,
    costs: Annotated[
        Path | None, typer.Option("--costs", help="Its costs; estimated if only --graph is given.")
    ] = None,
) -> None:
    """Says in words what bounds a plan: bottleneck, waiting, traffic, memory, lower bound.

    \b
      graphpipe explain plan.json
    """
    from graphpipe.plan.plan import Plan
    from graphpipe.programs.judging import explain_plan

    text = explain_plan(Plan.load(plan), graph, costs)
    output.text(text)
    output.result({"plan": str(plan), "lines": text.splitlines()})
