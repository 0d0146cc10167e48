"""``graphpipe train``."""

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
    command(app, "train")(train)


def train(
    output: Output,
    model: options.Model,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="Plan to train by; one for this machine if not given."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-n", min=1, help="Worker processes, if there is no plan: 2."),
    ] = None,
    batch_size: options.BatchSize = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps; one epoch if not given.")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="sgd, sgd-momentum, adagrad, adam, adamw; by default the job's own."),
    ] = None,
    learning_rate: Annotated[
        float, typer.Option("--lr", min=0, help="Learning rate of a named optimizer.")
    ] = 1e-3,
    clip_norm: Annotated[
        float | None, typer.Option(min=0, help="Largest norm of the whole gradient.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of initial values and dropout.")] = 0,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Chrome trace of the last step (open at ui.perfetto.dev)."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write the trained parameters (safetensors)."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="Folder for checkpoints; one at the end.")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints.")
    ] = None,
    keep: Annotated[int | None, typer.Option(min=1, help="How many checkpoints stay.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    elastic: Annotated[
        bool,
        typer.Option("--elastic", help="Plan anew for the ranks of each start, and resume."),
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(min=1, help="Seconds after which a rank that does not answer is lost."),
    ] = 1800.0,
    history: Annotated[
        Path | None, typer.Option(help="Append step, loss and workers to this file (JSON lines).")
    ] = None,
) -> None:
    """Trains a model on worker processes of this machine, which it starts itself.

    Under torchrun each process becomes one rank instead, on as many machines as you like.
    The job's data function gives the mini-batches.

    \b
      graphpipe train zoo:digits --workers 4 --steps 50
      graphpipe train my_model.py:job --plan plan.json --optimizer adamw --lr 3e-4
      torchrun --nproc-per-node 4 -m graphpipe train zoo:digits --steps 50
      graphpipe train zoo:digits --steps 200 --save checkpoints --save-every 50 --resume
    """
    from graphpipe.programs.train import Settings, prepare, save_state
    from graphpipe.programs.train import train as run
    from graphpipe.report.chrome_trace import write_chrome_trace

    settings = Settings(
        steps, optimizer, learning_rate, clip_norm, seed, trace is not None,
        save=save, save_every=save_every, keep=keep, resume=resume, elastic=elastic,
        timeout=timeout, history=history,
    )  # fmt: skip
    prepared = prepare(model, settings, plan=plan, workers=workers, batch_size=batch_size)
    with output.progress("training") as bar:
        outcome = run(
            prepared,
            settings,
            lambda done, total, loss: bar(done, total, f"loss {loss:.4g}"),
            keep_state=out is not None,
        )
    if outcome is None:
        return
    losses = outcome.losses
    if not losses:
        output.text(f"All steps had been taken: {save} holds the last checkpoint.")
        output.result({"losses": [], "seconds": outcome.seconds})
        return
    output.text(
        f"{len(losses)} steps of {prepared.plan.batch_size} samples in "
        f"{format_ns(outcome.seconds * 1e9, 3)}: "
        f"loss {losses[0]:.4g} at first, {losses[-1]:.4g} at last."
    )
    output.result({"losses": losses, "seconds": outcome.seconds})
    if trace is not None and outcome.measured is not None:
        write_chrome_trace(trace, outcome.measured)
        output.note(f"Wrote {trace}.")
    if out is not None:
        save_state(outcome.state, out)
        output.note(f"Wrote {out}.")
