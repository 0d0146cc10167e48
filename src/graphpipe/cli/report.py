"""``graphpipe report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphpipe.cli import options
from graphpipe.cli.command import command
from graphpipe.cli.output import Output


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    command(app, "report")(report)


def report(
    output: Output,
    plan: options.PlanFile,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path(
        "report.html"
    ),
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="A measured timeline (measured.json), shown below."),
    ] = None,
    comparison: Annotated[
        Path | None,
        typer.Option("--comparison", help="Other planners' results, from graphpipe compare -o."),
    ] = None,
) -> None:
    """Writes one HTML file that shows a plan: stages, timeline, memory, bottleneck.

    It opens offline in any browser.

    \b
      graphpipe report plan.json -o report.html
      graphpipe report out/demo/plan.json --trace out/demo/measured.json
    """
    from graphpipe.plan.plan import Plan
    from graphpipe.planner.compare import Comparison
    from graphpipe.report.files import write_text
    from graphpipe.report.page import write_report
    from graphpipe.simulate.simulator import simulate
    from graphpipe.simulate.timeline import Timeline

    found = Plan.load(plan)
    write_report(
        found,
        simulate(found),
        path=out,
        measured=None if trace is None else Timeline.load(trace),
        comparison=None if comparison is None else Comparison.load(comparison),
    )
    output.result({"report": str(out)})
    output.note(f"Wrote {out}.")
