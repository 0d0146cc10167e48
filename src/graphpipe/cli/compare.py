"""``graphpipe compare``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphpipe.cli import options
from graphpipe.cli.command import command
from graphpipe.cli.output import Output
from graphpipe.units import format_bytes, format_ns

if TYPE_CHECKING:
    from graphpipe.planner.compare import ComparisonRow


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    command(app, "compare")(compare)


def compare(
    output: Output,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="zoo:NAME, path/to/file.py:factory or graph.json."),
    ] = None,
    graph: Annotated[
        Path | None, typer.Option("--graph", help="A published profile instead of a model.")
    ] = None,
    device: options.DeviceName = None,
    devices: Annotated[
        str, typer.Option("--devices", "-n", help="Numbers of devices, such as 4,8,16.")
    ] = "4,8",
    per_node: options.PerNode = None,
    memory: options.MemoryGiB = None,
    batch_size: options.BatchSize = None,
    per_device: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of a mini-batch for each device, instead of B."),
    ] = None,
    planners: Annotated[
        str | None, typer.Option(help="Only these, such as chain,pipedream; all by default.")
    ] = None,
    optimizer: options.Optimizer = "adamw",
    precision: options.Precision = "fp32",
    time_limit: Annotated[
        float, typer.Option(min=0, help="CPU seconds for each published planner on one graph.")
    ] = 10.0,
    out: options.Out = None,
) -> None:
    """Runs this planner and published ones on the same costs, and prints one table.

    A planner that does not end on the graph in its time gets one with its chains fused, and the
    note says so. An interruption (Ctrl-C) prints and saves the rows that are there.

    \b
      graphpipe compare zoo:candle-uno --device v100-16gb --devices 4,8 --per-device 1024
      graphpipe compare --graph profile.json --devices 8 -o compare.json
    """
    from graphpipe.programs.judging import compare_planners
    from graphpipe.programs.planning import Hardware

    counts = options.numbers(devices, "--devices")
    rows: list[ComparisonRow] = []
    try:
        with output.progress("comparing") as bar:
            compare_planners(
                model,
                graph,
                [Hardware(None, device, count, per_node, memory) for count in counts],
                batch_size=batch_size,
                per_device=per_device,
                planners=None if planners is None else planners.split(","),
                optimizer=optimizer,
                precision=precision,
                time_limit=time_limit,
                progress=lambda done, total, name: bar(done, total, name),
                keep=rows.append,
            )
    except KeyboardInterrupt:
        if rows:
            output.note(f"Interrupted: {len(rows)} rows were found.")
            _show(output, rows, out)
        raise
    _show(output, rows, out)


def _show(output: Output, rows: Sequence[ComparisonRow], out: Path | None) -> None:
    """Prints the rows as a table or as JSON, and saves them if a file is named."""
    from graphpipe.planner.compare import Comparison

    output.table(
        "",
        (
            "devices", "planner", "variant", "samples/s", "ours is faster by", "iteration",
            "over bound", "bottleneck", "depth", "bubble", "memory", "search", "note",
        ),
        [
            (
                row.devices,
                row.planner,
                row.variant,
                "-" if row.throughput is None else f"{row.throughput:.4g}",
                "-" if row.ratio is None else f"{row.ratio:.3f}x",
                "-" if row.iteration_ns is None else format_ns(row.iteration_ns, 3),
                "-" if row.lower_bound_gap is None else f"{row.lower_bound_gap:.1%}",
                "-" if row.bottleneck_ns is None else format_ns(row.bottleneck_ns, 3),
                "-" if row.depth is None else row.depth,
                "-" if row.bubble is None else f"{row.bubble:.1%}",
                "-" if row.peak_memory_bytes is None else format_bytes(row.peak_memory_bytes, 3),
                "-" if row.search_seconds is None else format_ns(row.search_seconds * 1e9, 3),
                row.note,
            )
            for row in rows
        ],
    )  # fmt: skip
    found = Comparison(rows=tuple(rows))
    output.result(found)
    if out is not None:
        found.save(out)
        output.note(f"Wrote {out}.")
