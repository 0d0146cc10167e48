"""``graphpipe emulate``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from graphpipe.cli import options
from graphpipe.cli.command import command
from graphpipe.cli.output import Output
from graphpipe.units import format_ns


class Clock(StrEnum):
    """How an emulated task takes its time."""

    virtual = "virtual"
    sleep = "sleep"


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    command(app, "emulate")(emulate)


def emulate(
    output: Output,
    plan: options.PlanFile,
    clock: Annotated[
        Clock,
        typer.Option(help="virtual: a clock carried in the messages; sleep: real time passes."),
    ] = Clock.virtual,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations to run.")] = 1,
    out: options.Out = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Chrome trace (open it at ui.perfetto.dev).")
    ] = None,
) -> None:
    """Runs all ranks of a plan as processes here: real messages, planned compute times.

    Shows that the schedule runs, and how long it takes, without its devices.

    \b
      graphpipe emulate plan.json
      graphpipe emulate plan.json --clock sleep --trace emulated.json
    """
    from graphpipe.plan.plan import Plan
    from graphpipe.report.chrome_trace import write_chrome_trace
    from graphpipe.runtime.emulate import emulate as run
    from graphpipe.simulate.simulator import simulate
    from graphpipe.simulate.text import render

    found = Plan.load(plan)
    predicted = simulate(found, network="channel")
    timeline = run(found, clock=clock.value, iterations=iterations)
    output.text(render(timeline, output.width))
    output.text(
        f"Emulated {format_ns(timeline.iteration_ns, 3)}, "
        f"simulated {format_ns(predicted.iteration_ns, 3)} "
        f"({timeline.iteration_ns - predicted.iteration_ns:+d} ns)."
    )
    output.result(timeline)
    if out is not None:
        timeline.save(out)
        output.note(f"Wrote {out}.")
    if trace is not None:
        write_chrome_trace(trace, predicted, timeline)
        output.note(f"Wrote {trace}.")
