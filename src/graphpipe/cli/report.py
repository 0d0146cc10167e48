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
    out: Annotated[
        Path, typer.Option("--out", "-o", help="HTML file to write.", show_default=True)
    ] = Path("report.html"),
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="A measured timeline (Timeline.save, or emulate -o), shown below the predicted.",
        ),
    ] = None,
    comparison: Annotated[
        Path | None,
        typer.Option("--comparison", help="Other planners' results, from 'graphpipe compare -o'."),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", help="Write the schedule as torch's pipelines note it."),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option("--svg", help="Write the timeline as a picture."),
    ] = None,
) -> None:
    """Writes a page that shows a plan: stages, timeline, memory, and what holds it up.

    The page is one file that opens offline in any browser. The schedule can be written as CSV
    too, and the timeline as SVG.

    \b
      graphpipe report plan.json
      graphpipe report plan.json --trace measured.json --comparison compare.json -o plan.html
    """
    from graphpipe.plan.plan import Plan
    from graphpipe.planner.compare import Comparison
    from graphpipe.report.files import write_text
    from graphpipe.report.page import write_report
    from graphpipe.report.svg import timeline_svg
    from graphpipe.report.torch_schedule import schedule_csv
    from graphpipe.simulate.simulator import simulate
    from graphpipe.simulate.timeline import Timeline
    from graphpipe.simulate.words import describe

    loaded = Plan.load(plan)
    timeline = simulate(loaded)
    write_report(
        loaded,
        timeline,
        path=out,
        measured=None if trace is None else Timeline.load(trace),
        comparison=None if comparison is None else Comparison.load(comparison),
    )
    written = [out]
    if csv is not None:
        write_text(csv, schedule_csv(loaded), what="the schedule")
        written.append(csv)
    if svg is not None:
        write_text(svg, timeline_svg(loaded, timeline), what="the picture")
        written.append(svg)
    sentences = describe(loaded, timeline)
    output.text("\n".join(sentences))
    output.result({"written": [str(path) for path in written], "sentences": sentences})
    output.note(f"Wrote {', '.join(str(path) for path in written)}.")
