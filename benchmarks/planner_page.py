"""The page ``docs/measured/planner.md``, made from the rows of ``benchmarks/planner.py``."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import date

from graphpipe.planner.compare import CHAIN, OURS, PLANNERS, ComparisonRow

FREE_MEMORY = 2**50
"""Bytes of a device without a limit."""
SEARCH = "search"
"""Variants of rows about search time start with it."""
ABLATION = "ablation"

_PARTS = ("efficiency", "recompute", "all_reduce", "optimizer", "imbalance", "bubble")
_SEARCH_HEAD = (
    *("model", "devices", "planner", "units", "down-sets"),
    *("theirs, all sizes", "theirs, one size", "ours", "ratio", "ratio, one size"),
)
_Key = tuple[str, int, int, int]


def input_of(row: ComparisonRow) -> _Key:
    """What the planner of a row was given."""
    return row.model, row.devices, row.batch_size, row.memory_bytes


def with_bound_of_ours(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """The rows with the lower bound of ours on the same input: rows may be made at different
    times, and a bound gets better."""
    bounds = {input_of(row): row for row in rows if row.variant == "ours" and row.lower_bound_ns}
    found = []
    for row in rows:
        base = bounds.get(input_of(row))
        if base is not None and row.lower_bound_ns:
            gap = None if row.iteration_ns is None else row.iteration_ns / base.lower_bound_ns - 1
            update = {"lower_bound_ns": base.lower_bound_ns, "binding": base.binding}
            row = row.model_copy(update={**update, "lower_bound_gap": gap})
        found.append(row)
    return found


def page(
    rows: Sequence[ComparisonRow],
    commands: str,
    wanted: Sequence[_Key],
    remarks: Sequence[str] = (),
) -> str:
    """Markdown with every row: throughputs, gaps, search times, ablations.

    Args:
        rows: Of ``benchmarks/planner.py``, with ratios.
        commands: What made them.
        wanted: The inputs that belong into the tables; those without rows are named.
        remarks: On how the rows were made.
    """
    cells = [row for row in rows if not row.variant.startswith((SEARCH, ABLATION))]
    blocks = [
        "# Plans and search times",
        f"Made by `{commands}` on {date.today().isoformat()} on a "
        f"{os.cpu_count()}-core {_machine()} CPU, Python {platform.python_version()}. Throughput "
        "is simulated: nodes of eight V100-16GB, costs from the analytic estimate, every planner "
        "on the same costs and judged by the same simulator. Search times are CPU seconds.",
        "A number in the column of a planner is our throughput over its: 1.10 means that ours "
        "is 10 % faster. *published* is the best of the planners as published that were run, "
        "*chain* the best chain with all our freedoms (micro-batch sizes, replicas, copies, "
        "slack, recomputation, simulator). `*`: the planner did not end on the graph in its "
        "time, or refuses it, and got one with its chains fused; `-`: it has no plan that fits; "
        "`?`: not run. *gap* is our iteration time above [the lower bound](../lower-bound.md), "
        "*peak* the fullest device.",
        *remarks,
        "## In short",
        summary(rows, markdown=True),
        _missing(cells, wanted),
        *_cell_tables(cells),
        *_gap_tables(cells),
        *_search_table(rows),
        *_ablation_table(rows),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def summary(rows: Sequence[ComparisonRow], *, markdown: bool = False) -> str:
    """Least and largest ratio to each planner, and where; our search times."""
    cells = [row for row in rows if not row.variant.startswith((SEARCH, ABLATION))]
    lines = []
    for name in PLANNERS[1:]:
        mine = [(row.ratio, row) for row in cells if row.planner == name and row.ratio is not None]
        if not mine:
            continue
        low, high = (pick(mine, key=lambda item: item[0]) for pick in (min, max))
        below = sum(ratio < 1 for ratio, _ in mine)
        lines.append(
            f"{name}: x{low[0]:.3f} ({_place(low[1])}) to x{high[0]:.3f} ({_place(high[1])}); "
            f"below 1 in {below} of {len(mine)} cells"
        )
    ours = [row for row in cells if row.planner == OURS and row.search_seconds is not None]
    for model in dict.fromkeys(row.model for row in ours):
        mine = [row for row in ours if row.model == model]
        most = max(row.devices for row in mine)
        times = [row.search_seconds or 0.0 for row in mine if row.devices == most]
        lines.append(
            f"default search of {model} at {most} devices: {min(times):.2f} to {max(times):.2f} s"
        )
    return "\n".join(f"- {line}" if markdown else f"  {line}" for line in lines)


def _missing(cells: Sequence[ComparisonRow], wanted: Sequence[_Key]) -> str:
    """Which rows there are not yet."""
    have = {(*input_of(row), row.planner) for row in cells}
    lacking = {name: sum((*key, name) not in have for key in wanted) for name in PLANNERS}
    if not any(lacking.values()):
        return ""
    counts = ", ".join(f"{name} {count}" for name, count in lacking.items() if count)
    bare = [
        f"{model} on {devices} devices, B = {size}, {'16 GB' if memory < FREE_MEMORY else 'free'}"
        for model, devices, size, memory in wanted
        if all((model, devices, size, memory, name) not in have for name in PLANNERS)
    ]
    text = (
        f"**Not run yet**, of {len(wanted)} cells each (the command goes on where its file "
        f"ends): {counts}."
    )
    return text + (f" No row at all: {'; '.join(bare)}." if bare else "")


def _machine() -> str:
    return "x86" if platform.machine() == "x86_64" else platform.machine()


def _place(row: ComparisonRow) -> str:
    return f"{row.model}, {row.devices} devices, B = {row.batch_size}, {_limit(row)}"


def _limit(row: ComparisonRow) -> str:
    return "16 GB" if row.memory_bytes < FREE_MEMORY else "free"


def _ours(cells: Sequence[ComparisonRow], model: str) -> list[ComparisonRow]:
    mine = [row for row in cells if row.model == model and row.planner == OURS]
    return sorted(mine, key=lambda row: (row.devices, -row.batch_size, row.memory_bytes))


def _cell_tables(cells: Sequence[ComparisonRow]) -> list[str]:
    names = [name for name in PLANNERS[2:] if any(row.planner == name for row in cells)]
    blocks = []
    for model in dict.fromkeys(row.model for row in cells):
        head = ["devices", "B", "memory", "samples/s", "gap", "bubble", "peak", "search"]
        lines = [_line([*head, "published", CHAIN, *names]), _rule(len(head) + 2 + len(names))]
        for ours in _ours(cells, model):
            others = {row.planner: row for row in cells if input_of(row) == input_of(ours)}
            ratios = [others[n].ratio for n in names if n in others]
            known = [ratio for ratio in ratios if ratio is not None]
            lines.append(
                _line(
                    [
                        str(ours.devices),
                        str(ours.batch_size),
                        _limit(ours),
                        f"{ours.throughput or 0:.0f}",
                        f"{ours.lower_bound_gap or 0:.1%}",
                        f"{ours.bubble or 0:.1%}",
                        f"{(ours.peak_memory_bytes or 0) / 2**30:.1f} GiB",
                        f"{ours.search_seconds or 0:.2f} s",
                        f"{min(known):.2f}" if known else "?",
                        _ratio(others.get(CHAIN)),
                        *(_ratio(others.get(name)) for name in names),
                    ]
                )
            )
        blocks += [f"## {model}", "\n".join(lines)]
    return blocks


def _gap_tables(cells: Sequence[ComparisonRow]) -> list[str]:
    ours = [row for row in cells if row.planner == OURS and row.gap_parts]
    if not ours:
        return []
    head = ["model", "devices", "B", "memory", "ms", "bound", "binds", *_PARTS]
    lines = [_line([*(name.replace("_", "-") for name in head), "less"]), _rule(len(head) + 1)]
    for model in dict.fromkeys(row.model for row in ours):
        for row in _ours(ours, model):
            parts = [f"{row.gap_parts[part] * 1e3:.1f}" for part in _PARTS]
            lines.append(
                _line(
                    [
                        model,
                        str(row.devices),
                        str(row.batch_size),
                        _limit(row),
                        f"{(row.iteration_ns or 0) / 1e6:.1f}",
                        f"{row.lower_bound_ns / 1e6:.1f}",
                        row.binding.replace("_", " and "),
                        *parts,
                        f"{row.gap_parts['bound_over_work'] * 1e3:.1f}",
                    ]
                )
            )
    text = (
        "What our iteration holds above the lower bound, in milliseconds, averages over all "
        "devices: the sum of the parts, less what the bound itself holds beyond the ideal work "
        "(*less*), is the iteration time less the bound."
    )
    return ["## The gap to the lower bound", text, "\n".join(lines)]


def _search_table(rows: Sequence[ComparisonRow]) -> list[str]:
    found = [row for row in rows if row.variant.startswith(SEARCH)]
    if not found:
        return []
    lines = [
        _line(_SEARCH_HEAD),
        _rule(len(_SEARCH_HEAD)),
    ]
    for theirs in (row for row in found if row.planner != OURS):
        mine = {
            row.variant: row for row in found if row.planner == OURS and row.model == theirs.model
        }
        whole = mine.get(f"{theirs.variant}, graph as it is")
        same = mine.get(theirs.variant)
        head = [theirs.model, str(theirs.devices), theirs.planner]
        if whole is not None and theirs.fused:
            sets = "more than 1,000,000" if whole.down_sets is None else f"{whole.down_sets:,}"
            spent = f"{whole.search_seconds or 0:.2f} s"
            reason = theirs.note.rsplit("; ", 1)[0]
            lines.append(
                _line([*head, str(whole.units), sets, reason, "", spent, "does not end", ""])
            )
        if same is None or not same.search_seconds:
            continue
        spent = f"{same.search_seconds:.2f} s"
        sets = "" if theirs.down_sets is None else f"{theirs.down_sets:,}"
        if theirs.search_seconds is None:
            lines.append(_line([*head, str(same.units), sets, theirs.note, "", spent, "", ""]))
            continue
        longest = theirs.longest_seconds or 0.0
        lines.append(
            _line(
                [
                    *head,
                    f"{theirs.units}{' (fused)' if theirs.fused else ''}",
                    sets,
                    f"{theirs.search_seconds:.1f} s",
                    f"{longest:.2f} s",
                    spent,
                    f"{theirs.search_seconds / same.search_seconds:.1f}",
                    f"{longest / same.search_seconds:.1f}",
                ]
            )
        )
    text = (
        "Our default search, with all its freedoms, against our implementations of the "
        "published optimisers on the identical graph (CPU seconds; scheduling and simulation "
        "of the baselines' plans not counted). A published optimiser takes one micro-batch size "
        "and is run for each; *one size* is the one that took longest. *as it is*: the graph that "
        "our search works on by default."
    )
    return ["## Search time on the identical graph", text, "\n".join(lines)]


def _ablation_table(rows: Sequence[ComparisonRow]) -> list[str]:
    swept = [row for row in rows if row.variant.startswith(ABLATION)]
    if not swept:
        return []
    columns = ["ms", "bubble", "depth", "peak"]
    lines = [
        _line(
            [
                *("model", "micro-batch"),
                *(f"graph: {name}" for name in columns),
                *(f"sequence: {name}" for name in columns),
                "ratio",
            ]
        ),
        _rule(11),
    ]
    places = dict.fromkeys((row.model, row.variant.rsplit(" ", 1)[1]) for row in swept)
    for model, size in places:
        found = {
            row.planner: row
            for row in swept
            if row.model == model and row.variant.rsplit(" ", 1)[1] == size
        }
        cells = [model, size]
        for family in ("graph", "sequential"):
            row = found.get(family)
            if row is None:
                cells += ["-"] * 4
                continue
            used = "/".join(str(b) for b in row.micro_batches)
            cells += [
                f"{(row.iteration_ns or 0) / 1e6:.1f} (b {used})",
                f"{row.bubble or 0:.1%}",
                str(row.depth),
                f"{(row.peak_memory_bytes or 0) / 2**30:.1f} GiB",
            ]
        both = [found[f].iteration_ns for f in ("sequential", "graph") if f in found]
        if len(both) == 2 and both[0] and both[1]:
            cells.append(f"{both[0] / both[1]:.3f}")
        else:
            cells.append("-")
        lines.append(_line(cells))
    text = (
        "Multi-modal transformers of 32 layers in all, on 8 devices, one copy and no replicas, so "
        "that only the shape of the pipeline differs. With equal micro-batches the ratio is "
        "what less depth brings; *free* lets each choose its micro-batches."
    )
    return ["## Ablations: branches and micro-batches", text, "\n".join(lines)]


def _ratio(row: ComparisonRow | None) -> str:
    if row is None:
        return "?"
    if row.ratio is None:
        return "-"
    return f"{row.ratio:.2f}{'*' if row.fused else ''}"


def _rule(columns: int) -> str:
    return _line(["---"] * columns)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
