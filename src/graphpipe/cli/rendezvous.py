"""``graphpipe rendezvous``."""

from __future__ import annotations

from typing import Annotated

import typer

from graphpipe.cli.command import command
from graphpipe.cli.output import Output


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    command(app, "rendezvous")(rendezvous)


def rendezvous(
    output: Output,
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0: any free.")] = 29400,
) -> None:
    """Holds the store at which the agents of an elastic run meet, until it is interrupted.

    Start it on a machine that stays, and every agent with --rdzv-conf=is_host=0: then any
    agent may die (docs/elastic.md).

    \b
      graphpipe rendezvous --port 29400
      TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:4 --nproc-per-node 8 \\
        --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        --rdzv-conf is_host=0 -m graphpipe train my_model.py:job --elastic --save DIR
    """
    from graphpipe.programs.rendezvous import serve

    serve(port, lambda found: output.text(f"Agents may meet at port {found}."))
