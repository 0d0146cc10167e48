"""``graphpipe profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphpipe.cli import options
from graphpipe.cli.command import command
from graphpipe.cli.output import Output
from graphpipe.units import format_ns


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    command(app, "profile")(profile)


def profile(
    output: Output,
    model: options.Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="Cost file to write.")],
    device: Annotated[str, typer.Option(help="Where to measure: cpu, cuda, cuda:1.")] = "cpu",
    micro_batches: Annotated[
        str, typer.Option("--micro-batches", "-m", help="Sizes to measure at, samples.")
    ] = "1,2,4,8",
    optimizer: options.Optimizer = "adamw",
    precision: options.Precision = "fp32",
    split_joins: options.SplitJoins = False,
) -> None:
    """Measures every distinct operator of a model on a device of this machine.

    Forward and backward apart, for each micro-batch size. A file that is there already and
    fits model, versions and hardware is kept.

    \b
      graphpipe profile zoo:gpt2-tiny -o costs.json
      graphpipe plan zoo:gpt2-tiny --costs costs.json --device cpu-core --devices 4 -o plan.json
    """
    from graphpipe.graph.split_joins import split_joins as split
    from graphpipe.programs.measuring import measure
    from graphpipe.programs.planning import capture_job
    from graphpipe.zoo.load import load_job

    graph = capture_job(load_job(model))
    if split_joins:
        graph = split(graph)
    with output.progress("measuring") as bar:
        costs = measure(
            graph,
            out,
            device,
            micro_batches=options.numbers(micro_batches, "--micro-batches"),
            optimizer=optimizer,
            precision=precision,
            progress=bar,
            notice=output.note,
        )
    rows = []
    for kind in sorted(costs.devices):
        for size in costs.micro_batches:
            forward, backward = costs.op_seconds(kind, size)
            rows.append(
                (kind, size, format_ns(forward.sum() * 1e9, 3), format_ns(backward.sum() * 1e9, 3))
            )
    output.table(
        "All operators of one micro-batch", ("device", "samples", "forward", "backward"), rows
    )
    for text in costs.notes:
        output.note(f"Note: {text}")
    output.result(
        [dict(zip(("device", "samples", "forward", "backward"), row, strict=True)) for row in rows]
    )
    output.note(f"Costs are in {out}.")
