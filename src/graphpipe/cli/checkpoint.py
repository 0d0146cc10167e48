"""``graphpipe checkpoint show | verify | export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphpipe.cli.command import command
from graphpipe.cli.output import Output

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Where training saved, or one checkpoint in it.")
]


def register(app: typer.Typer) -> None:
    """Adds the group of commands to the application."""
    group = typer.Typer(
        name="checkpoint", no_args_is_help=True, rich_markup_mode=None,
        help="Shows, verifies and exports checkpoints.",
    )  # fmt: skip
    command(group, "show")(show)
    command(group, "verify")(verify)
    command(group, "export")(export)
    app.add_typer(group)


def show(output: Output, folder: Folder) -> None:
    """Says what a checkpoint holds (the newest complete one of a folder).

    \b
      graphpipe checkpoint show checkpoints
    """
    from graphpipe.runtime.checkpoint.folder import complete_checkpoints, locate, read_index

    found = locate(folder)
    index, _ = read_index(found)
    state = index.section("model")
    training = index.training
    optimizer = training.optimizer.type if training.optimizer is not None else None
    every = [path.name for path in reversed(complete_checkpoints(found.parent))]
    output.text(
        f"{found}: {index.model or 'a model'}, {training.iterations} mini-batches trained by "
        f"{index.world_size} ranks; {len(state)} parameters and buffers, optimizer "
        f"{optimizer or 'none'}, {len(training.schedulers)} schedulers.\n"
        f"Complete checkpoints: {', '.join(every)}."
    )
    output.result(
        {
            "path": str(found),
            "model": index.model,
            "iterations": training.iterations,
            "world_size": index.world_size,
            "optimizer": optimizer,
            "schedulers": len(training.schedulers),
            "tensors": {name: [entry.dtype, *entry.shape] for name, entry in state.items()},
            "checkpoints": every,
        }
    )


def verify(output: Output, folder: Folder) -> None:
    """Reads a checkpoint whole and checks every byte against its checksums.

    \b
      graphpipe checkpoint verify checkpoints
    """
    from graphpipe.runtime.checkpoint.folder import locate
    from graphpipe.runtime.checkpoint.plain import verify as run

    found = locate(folder)
    index = run(found)
    output.text(f"{found}: {len(index.tensors)} tensors, all as they were saved.")
    output.result({"path": str(found), "tensors": len(index.tensors)})


def export(
    output: Output,
    folder: Folder,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write (safetensors).")],
) -> None:
    """Writes the parameters and buffers of a checkpoint as one safetensors file.

    \b
      graphpipe checkpoint export checkpoints -o model.safetensors
    """
    from graphpipe.runtime.checkpoint.plain import export as run

    path = run(folder, out)
    output.note(f"Wrote {path}.")
    output.result({"path": str(path)})
