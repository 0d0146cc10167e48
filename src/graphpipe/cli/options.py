"""Arguments and options that several commands have, with one wording for each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphpipe.errors import InputError

Model = Annotated[str, typer.Argument(metavar="MODEL", help="zoo:NAME or path/to/file.py:factory.")]
PlanFile = Annotated[
    Path, typer.Argument(metavar="PLAN", help="A plan file, as 'graphpipe plan -o' writes it.")
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="4xdgx-a100, 2x8xv100-16gb (nodes x devices x kind) or a file (.toml, .json).",
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        "--device", help="Kind of device, such as a100-80gb; FILE.toml:NAME for your own."
    ),
]
Devices = Annotated[
    int | None, typer.Option("--devices", "-n", min=1, help="Number of devices in all.")
]
PerNode = Annotated[
    int | None,
    typer.Option("--per-node", min=1, help="Devices of one node; all by default, 8 at most."),
]
MemoryGiB = Annotated[
    float | None,
    typer.Option("--memory", min=0, help="GiB that a plan may use of each device, if not all."),
]
BatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", "-b", min=1, help="Samples of one optimizer step (B)."),
]
Optimizer = Annotated[
    str,
    typer.Option("--optimizer", help="sgd, sgd-momentum, adagrad, adam or adamw: memory and time."),
]
Precision = Annotated[
    str, typer.Option("--precision", help="fp32, tf32, bf16, bf16-mixed or fp16-mixed.")
]
SplitJoins = Annotated[
    bool,
    typer.Option("--split-joins", help="Take the graph with linears over branches split."),
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="File to write the result to.")]


def numbers(text: str, option: str) -> list[int]:
    """The ascending positive numbers of a text such as ``4,8,16``.

    Raises:
        InputError: If it is something else.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InputError(
            "Not a list of numbers", where=option, expected="such as 4,8,16", got=repr(text)
        )
    return sorted({int(part) for part in parts})


def assignment(text: str, option: str) -> tuple[str, int]:
    """Name and number of a text such as ``vision.blocks=3``.

    Raises:
        InputError: If it is something else.
    """
    name, _, number = text.rpartition("=")
    if not name or not number.isdecimal():
        raise InputError(
            "Not a name and a number", where=option, expected="such as vision=0", got=repr(text)
        )
    return name, int(number)
