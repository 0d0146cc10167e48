"""``graphpipe demo``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphpipe.cli.command import command
from graphpipe.cli.output import Output
from graphpipe.units import format_ns

if TYPE_CHECKING:
    from graphpipe.programs.demo import Equality


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    command(app, "demo")(demo)


def demo(
    output: Output,
    workers: Annotated[
        int, typer.Option("--workers", "-w", min=1, help="Worker processes on this machine.")
    ] = 4,
    batch_size: Annotated[
        int, typer.Option("--batch-size", "-b", min=2, help="Samples of one optimizer step.")
    ] = 128,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 10,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for plan and traces.")] = Path(
        "out/demo"
    ),
) -> None:
    """Trains image and text towers on handwritten digits, as a graph of stages.

    The data is real: 1,797 images that scikit-learn ships, and a caption for each. Nothing
    is downloaded. Plan, predicted and measured timeline and a Chrome trace (open it at
    https://ui.perfetto.dev) are left in the output folder.

    \b
      graphpipe demo
      graphpipe demo --workers 2 --epochs 5
    """
    from graphpipe.programs.demo import Settings, prepare, run
    from graphpipe.report.chrome_trace import write_chrome_trace
    from graphpipe.simulate.text import render

    settings = Settings(workers=workers, batch_size=batch_size, epochs=epochs)
    output.note("Capturing the model and its loss, and searching a plan ...")
    prepared = prepare(settings)
    output.text(prepared.plan)
    output.text(
        "\nEach tower is pinned to devices of its own, so that the pipeline can be seen; for a "
        "model as\nsmall as this, replicas of both towers on every device would be quicker."
    )
    output.text("\nOne iteration, predicted:\n")
    output.text(render(prepared.predicted, output.width))
    output.note(f"\nStarting {workers} workers ...")
    outcome = run(prepared, settings, _Screen(output))
    output.text("\nOne iteration, measured:\n")
    output.text(render(outcome.measured, output.width))
    out.mkdir(parents=True, exist_ok=True)
    prepared.plan.save(out / "plan.json")
    outcome.measured.save(out / "measured.json")
    write_chrome_trace(out / "trace.json", prepared.predicted, outcome.measured)
    accuracy = outcome.accuracies[-1][1]
    output.text(
        f"\n{100 * accuracy:.1f} % of the held-out digits are told by their caption, after "
        f"{format_ns(outcome.seconds * 1e9, 3)} of training."
    )
    output.note(f"Wrote {out}/plan.json, {out}/measured.json and {out}/trace.json.")
    output.result(
        {
            "loss_difference": outcome.equality.loss,
            "parameter_difference": outcome.equality.parameters,
            "losses": outcome.losses,
            "accuracy": accuracy,
            "seconds": outcome.seconds,
            "predicted_iteration_ns": prepared.predicted.iteration_ns,
            "measured_iteration_ns": outcome.measured.iteration_ns,
            "plan": str(out / "plan.json"),
            "trace": str(out / "trace.json"),
        }
    )


class _Screen:
    """Shows what happens, in the process of rank 0."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._bar = output.bar("training")

    def equality(self, found: Equality) -> None:
        self._output.text(
            f"\nThe same {found.steps} steps of SGD in fp32 by this pipeline and by one process "
            f"differ by at most\n  {found.loss:.1e} in the loss\n  {found.parameters:.1e} in "
            "the parameters\n"
        )

    def step(self, done: int, total: int, loss: float) -> None:
        self._bar(done, total, f"loss {loss:.3f}")

    def epoch(self, epoch: int, loss: float, accuracy: float | None) -> None:
        text = f"epoch {epoch:3d}   loss {loss:.3f}"
        if accuracy is not None:
            text += f"   zero-shot accuracy {100 * accuracy:.1f} %"
        self._output.text(text)
