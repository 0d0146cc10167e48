"""``graphpipe plan``."""

from __future__ import annotations

from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Annotated, Literal

import typer

from graphpipe.cli import options
from graphpipe.cli.command import command
from graphpipe.cli.output import Output
from graphpipe.units import format_ns


class Recompute(StrEnum):
    """Whether stages keep their inputs only and run their forward again in the backward."""

    auto = "auto"
    on = "on"
    off = "off"


class Coupled(StrEnum):
    """What a loss that mixes the samples of a mini-batch sees."""

    mini_batch = "mini_batch"
    micro_batch = "micro_batch"


_RECOMPUTE: dict[Recompute, bool | Literal["auto"]] = {
    Recompute.auto: "auto",
    Recompute.on: True,
    Recompute.off: False,
}


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
    profiled_batch: Annotated[
        int | None,
        typer.Option(
            "--profiled-batch",
            min=1,
            help="Samples that a profile of PipeDream was taken with, which it does not say.",
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
    recompute: Annotated[
        Recompute,
        typer.Option(help="auto: where memory asks for it; on: in every stage; off: nowhere."),
    ] = Recompute.auto,
    coupled: Annotated[
        Coupled,
        typer.Option(
            help="A loss that mixes samples runs on the whole mini-batch (exact), or per "
            "micro-batch."
        ),
    ] = Coupled.mini_batch,
    micro_batches: Annotated[
        str | None,
        typer.Option("--micro-batches", "-m", help="Samples of a task to try, such as 8,16."),
    ] = None,
    replicas: Annotated[
        bool, typer.Option(help="Whether stages may be replicated over devices.")
    ] = True,
    pin: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=RANK", help="Run a module or operator on a device; repeat."),
    ] = None,
    together: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Cut nowhere through this module; repeat."),
    ] = None,
    split_joins: Annotated[
        bool,
        typer.Option(
            "--split-joins",
            help="Also try to split linears over concatenated branches, and take the better plan.",
        ),
    ] = False,
    split_costs: Annotated[
        Path | None,
        typer.Option(
            "--split-costs",
            help="Measured costs with the joins split (profile --split-joins), beside --costs.",
        ),
    ] = None,
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
      graphpipe plan my_model.py:job --device l4 -n 4 --pin vision=0 --together text.layers.0
    """
    from graphpipe.cost.table import CostTable
    from graphpipe.planner.constraints import Constraints
    from graphpipe.planner.search import plan as search
    from graphpipe.programs.planning import Hardware, Source

    problem = Source(model, graph, profiled_batch).problem(
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
            recompute=_RECOMPUTE[recompute],
            coupled=coupled.value,
            micro_batches=None
            if micro_batches is None
            else options.numbers(micro_batches, "--micro-batches"),
            replicas=replicas,
            constraints=Constraints(
                together=[[name] for name in together or ()],
                pin=dict(options.assignment(text, "--pin") for text in pin or ()),
            ),
            time_limit=time_limit,
            split_joins=split_joins if split_costs is None else CostTable.load(split_costs),
            progress=lambda done, best: tick(done, note=_best(best)),
        )
    output.text(found)
    output.result(found)
    if out is not None:
        found.save(out)
        output.note(f"Wrote {out}.")


def _best(seconds: float) -> str:
    """What stands beside the bar; nothing has been found yet while it is infinite."""
    return f"best so far {format_ns(seconds * 1e9, 3)}" if isfinite(seconds) else ""
