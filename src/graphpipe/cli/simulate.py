"""``graphpipe simulate``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from graphpipe.cli import options
from graphpipe.cli.command import command
from graphpipe.cli.output import Output


class Network(StrEnum):
    """The simulator's network models."""

    shared = "shared"
    channel = "channel"


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    command(app, "simulate")(simulate)


def simulate(
    output: Output,
    plan: options.PlanFile,
    network: Annotated[
        Network,
        typer.Option(help="shared: links are shared fairly; channel: each pair has its own."),
    ] = Network.shared,
    out: options.Out = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Write a Chrome trace (open it at ui.perfetto.dev)."),
    ] = None,
    dot: Annotated[
        Path | None, typer.Option("--dot", help="Write the stage graph for Graphviz.")
    ] = None,
) -> None:
    """Simulates one iteration of a plan and draws it, one line a device.

    \b
      graphpipe simulate plan.json
      graphpipe simulate plan.json -o timeline.json --trace trace.json
    """
    from graphpipe.plan.plan import Plan
    from graphpipe.report.chrome_trace import write_chrome_trace
    from graphpipe.report.files import write_text
    from graphpipe.simulate.simulator import simulate as run
    from graphpipe.simulate.text import render

    found = Plan.load(plan)
    timeline = run(found, network=network.value)
    output.text(render(timeline, output.width))
    output.result(timeline)
    if out is not None:
        timeline.save(out)
        output.note(f"Wrote {out}.")
    if trace is not None:
        write_chrome_trace(trace, timeline)
        output.note(f"Wrote {trace}.")
    if dot is not None:
        write_text(dot, found.to_dot(), what="the stage graph")
        output.note(f"Wrote {dot}.")
