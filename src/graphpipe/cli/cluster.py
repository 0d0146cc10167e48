"""``graphpipe cluster ...``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphpipe.cli import options
from graphpipe.cli.command import command
from graphpipe.cli.output import Output
from graphpipe.units import format_bytes, format_ns


def register(app: typer.Typer) -> None:
    """Adds the commands to the application."""
    group = typer.Typer(
        name="cluster",
        help="Describes the devices to plan for.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    command(group, "probe")(probe)
    command(group, "show")(show)
    command(group, "devices")(devices)
    app.add_typer(group)


def probe(
    output: Output,
    out: Annotated[Path, typer.Option("--out", "-o", help="Cluster file to write (TOML).")],
    device: Annotated[str, typer.Option(help="cpu (gloo) or cuda (NCCL).")] = "cpu",
    name: Annotated[str, typer.Option(help="Name of the cluster.")] = "probed",
) -> None:
    """Measures bandwidth and latency between the ranks that it is started on.

    Start it with torchrun on every node that you plan to use; rank 0 writes the file.

    \b
      torchrun --nproc-per-node 2 -m graphpipe cluster probe -o cluster.toml
    """
    from graphpipe.programs.measuring import probe_here

    found = probe_here(device, name, out)
    if found is None:
        return
    output.table(
        "",
        ("link", "latency", "bandwidth"),
        [
            (
                f"{x.source} -> {x.target}",
                format_ns(x.latency * 1e9, 3),
                f"{format_bytes(x.bandwidth, 3)}/s",
            )
            for x in found.links
        ],
    )
    output.result(found.cluster)
    output.note(f"Wrote {out}.")


def show(
    output: Output,
    cluster: Annotated[
        str, typer.Argument(help="4xdgx-a100, 2x8xv100-16gb or a file (.toml, .json).")
    ],
    out: options.Out = None,
) -> None:
    """Shows a cluster, or writes it to a file to be edited.

    \b
      graphpipe cluster show 2xdgx-h100
      graphpipe cluster show 4x8xa100-80gb -o cluster.toml
    """
    from graphpipe.cost.boxes import named_cluster

    found = named_cluster(cluster)
    output.table(
        found.name,
        ("rank", "node", "kind", "memory"),
        [(i, x.node, x.kind, format_bytes(x.memory_bytes, 3)) for i, x in enumerate(found.devices)],
    )
    output.result(found)
    if out is not None:
        found.save(out)
        output.note(f"Wrote {out}.")


def devices(output: Output) -> None:
    """Lists the kinds of device that the catalogue knows, with their data sheet's figures.

    \b
      graphpipe cluster devices
    """
    from graphpipe.cost.catalogue import catalogue

    known = catalogue().values()
    output.table(
        "",
        ("device", "memory", "bandwidth", "fp32 TFLOP/s", "bf16 TFLOP/s", "source"),
        [
            (
                x.name,
                format_bytes(x.total_memory_bytes, 3),
                f"{x.bandwidth / 1e9:.0f} GB/s",
                f"{x.rate('float32') / 1e12:.4g}",
                f"{x.rate('bfloat16') / 1e12:.4g}",
                x.source,
            )
            for x in known
        ],
    )
    output.result(list(known))
