"""The page ``docs/measured/runtime.md``, from what ``benchmarks/runtime.py`` measured."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

import torch

Rows = Sequence[Mapping[str, Any]]


def page(parts: Mapping[str, Rows]) -> str:
    """Markdown with a section for each part that was measured."""
    sections = [
        section(parts[name])
        for name, section in (
            ("steps", _steps),
            ("overhead", _overhead),
            ("checks", _checks),
            ("promise", _promise),
            ("sleep", _sleep),
            ("memory", _memory),
        )
        if parts.get(name)
    ]
    head = (
        "# The runtime, measured\n\n"
        f"Made by `python benchmarks/runtime.py --json runtime.json --markdown "
        f"docs/measured/runtime.md` on {date.today().isoformat()}, on a "
        f"{os.cpu_count()}-core {_processor()} CPU with torch {torch.__version__}, one compute "
        "thread per worker.\n"
    )
    return "\n".join([head, *sections])


def _processor() -> str:
    return "x86" if platform.machine() in ("x86_64", "AMD64") else platform.machine()


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def _steps(rows: Rows) -> str:
    table = _table(
        ["size", "workers", "ours, ms", "theirs, ms", "ratio", "95 % interval", "CPU ratio"],
        [
            (
                row["size"],
                row["workers"],
                f"{row['ours_seconds'] * 1e3:.2f}",
                f"{row['theirs_seconds'] * 1e3:.2f}",
                f"{row['ratio']:.3f}",
                f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}",
                f"{row['cpu_ratio']:.3f}",
            )
            for row in rows
        ],
    )
    middle = statistics.median(row["ratio"] for row in rows)
    return (
        "## Against torch.distributed.pipelining\n\n"
        "Chains of equal layers, one stage a worker, the same micro-batches, 1F1B both times, SGD "
        "both times; ours also gives the loss to every rank. Both take turns in the same "
        f"processes ({rows[0]['pairs']} pairs); the ratio of each pair counts, and its median and "
        "bootstrap interval are shown. CPU seconds are those of all workers.\n\n"
        f"{table}\nMedian of the ratios: {middle:.3f}; largest upper end: "
        f"{max(row['ratio_high'] for row in rows):.3f}; largest ratio of CPU time: "
        f"{max(row['cpu_ratio'] for row in rows):.3f}.\n"
    )


def _overhead(rows: Rows) -> str:
    row = rows[0]
    return (
        "## What a task costs\n\n"
        "Without messages, beyond the stage's own forward or backward: "
        f"{row['overhead_microseconds_per_task']:.1f} microseconds (a bare loop over the same "
        f"micro-batches takes {row['bare_microseconds_per_task']:.1f}, the runtime "
        f"{row['ours_microseconds_per_task']:.1f}).\n"
    )


def _checks(rows: Rows) -> str:
    return (
        "## What every start checks\n\n"
        "CPU seconds to build the action lists of a plan, and to check the plan with them.\n\n"
        + _table(
            ["model", "ranks", "tasks", "messages", "build, s", "check, s"],
            [
                (
                    row["model"],
                    row["ranks"],
                    row["tasks"],
                    row["messages"],
                    f"{row['build_seconds']:.3f}",
                    f"{row['check_seconds']:.3f}",
                )
                for row in rows
            ],
        )
    )


def _promise(rows: Rows) -> str:
    table = _table(
        ["model", "ranks", "mini-batch", "promised", "measured", "difference"],
        [
            (
                row["model"],
                row["devices"],
                row["batch_size"],
                f"{row['promised']:.3f}",
                f"{row['measured']:.3f}",
                f"{row['error']:+.1%}",
            )
            for row in rows
        ],
    )
    worst = max(abs(row["error"]) for row in rows)
    return (
        "## The speed-up that the simulator promises\n\n"
        "The default plan against the best sequential plan with the same freedoms (a chain of "
        "stages), on nodes of eight V100 with 16 GB. Every rank is a process, messages are real, "
        "and computing is replaced by sleeping for the planned time, stretched. Wall-clock "
        f"speed-up against the simulated one; largest difference {worst:.1%}.\n\n{table}"
    )


def _sleep(rows: Rows) -> str:
    return (
        "## Emulation by sleeping\n\n"
        "Default plans of 16 ranks, stretched so that the shortest task takes 20 ms.\n\n"
        + _table(
            ["model", "tasks", "simulated, s", "measured, s", "difference"],
            [
                (
                    row["model"],
                    row["tasks"],
                    f"{row['simulated_seconds']:.2f}",
                    f"{row['measured_seconds']:.2f}",
                    f"{row['error']:+.1%}",
                )
                for row in rows
            ],
        )
    )


def _memory(rows: Rows) -> str:
    cases = sorted({(row["model"], row["shape"]) for row in rows})
    lines = []
    for model, shape in cases:
        mine = [row for row in rows if (row["model"], row["shape"]) == (model, shape)]
        # What decides whether a plan fits is the rank with the largest peak.
        top = max(mine, key=lambda row: row["measured"])
        errors = [row["error"] for row in mine]
        lines.append(
            (
                model,
                shape,
                len(mine),
                f"{top['predicted'] / 1e6:.2f}",
                f"{top['measured'] / 1e6:.2f}",
                f"{top['error']:+.1%}",
                f"{min(errors):+.1%} to {max(errors):+.1%}",
            )
        )
    worst = max(abs(row["error"]) for row in rows)
    within = sum(abs(row["error"]) <= 0.05 for row in rows)
    return (
        "## Peak memory\n\n"
        "Tensor memory of each worker over a step, from the allocations that PyTorch's profiler "
        f"reports, against the simulated peak. {within} of {len(rows)} ranks lie within 5 %, the "
        f"farthest is {worst:.1%} off.\n\n"
        + _table(
            ["model", "plan", "ranks", "predicted, MB", "measured, MB", "difference", "all ranks"],
            lines,
        )
    )
