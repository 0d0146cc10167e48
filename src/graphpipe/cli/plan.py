"""``graphpipe plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphpipe.cli import options
from graphpipe.cli.command import command
from graphpipe.cli.output import Output, seconds


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    command(app, "plan")(plan)


def plan(
    output: Output,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="zoo:NAME, path/to/file.py:factory, or a captured graph (.json).",
        ),
    ] = None,
    graph: Annotated[
        Path | None,
        typer.Option(
            "--graph",
            help="Plan for a published profile or a plain cost graph instead of a model.",
        ),
    ] = None,
    device: options.DeviceName = None,
    devices: options.Devices = None,
    per_node: options.PerNode = None,
    memory: options.MemoryGiB = None,
    cluster: options.ClusterName = None,
    batch_size: options.BatchSize = None,
    costs: Annotated[
        Path | None,
        typer.Option("--costs", help="Measured costs; estimated for the devices if not given."),
    ] = None,
    optimizer: options.Optimizer = "adamw",
    precision: options.Precision = "fp32",
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", min=0, help="Stop searching after so many seconds."),
    ] = None,
    out: options.Out = None,
) -> None:
    """Searches the fastest plan for a model on given devices, which need not be here.

    The model is captured without being run, and built without memory for its values. The
    plan says which operators form a stage, where each stage runs, with which micro-batch
    size and in which order; it predicts time and memory. Nothing is random: the same input
    gives the same plan.

    \b
      graphpipe plan zoo:mmt --device v100-16gb --devices 8 --batch-size 128 -o plan.json
      graphpipe plan my_model.py:job --cluster cluster.toml -b 4096
      graphpipe plan --graph profile.json --devices 8 --batch-size 256
    """
    from graphpipe.planner.search import plan as search
    from graphpipe.programs.planning import Hardware, Source

    problem = Source(model, graph).problem(
        Hardware(cluster, device, devices, per_node, memory),
        batch_size=batch_size,
        costs=costs,
        optimizer=optimizer,
        precision=precision,
    )
    with output.progress("searching") as tick:
        found = search(
            problem.graph,
            problem.costs,
            problem.cluster,
            batch_size=problem.batch_size,
            time_limit=time_limit,
            progress=lambda done, best: tick(done, note=f"best so far {seconds(best)}"),
        )
    output.text(found)
    output.result(found)
    if out is not None:
        found.save(out)
        output.note(f"Wrote {out}.")
