"""Plans and search times: ours against the published planners, on the paper's three models.

``python benchmarks/planner.py [--json FILE] [--models a,b] [--devices 4,8,16,32]
[--fractions 1,0.25] [--memory limited,free] [--planners ...] [--time-limit 60] [--only PART]
[--markdown FILE]``

Nodes of eight V100-16GB, costs from the analytic estimate, all planners on the same input
and judged by the same simulator. Three parts:

- *cells*: every model, number of devices, mini-batch (the usual one and a quarter of it) and
  memory limit. Baselines as published, and the best chain with all our freedoms. The ratio is
  our throughput over theirs. The gap to the lower bound is decomposed for ours.
- *search*: CPU seconds of PipeDream's and Piper's optimisers at the most devices, per
  micro-batch size and over all, against our default search on the *identical* graph.
- *ablations*: branches 2, 4, 8 and 16 at a fixed total size; the micro-batch size swept;
  sequential against graph at the same micro-batch size (one copy, no replicas: what depth
  alone brings).

A baseline that needs more than ``--time-limit`` CPU seconds, or that refuses the graph, gets
one with its chains fused; the table marks it with ``*``. ``--json`` is written after every
cell, and cells that it already holds are not run again, so that long runs can be resumed.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import NamedTuple

from graphpipe.cost.analytic import estimate
from graphpipe.cost.boxes import named_cluster
from graphpipe.cost.cluster import Cluster
from graphpipe.cost.table import CostTable
from graphpipe.errors import GraphPipeError
from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.planner.compare import (
    CHAIN,
    OURS,
    PLANNERS,
    Compared,
    Comparison,
    ComparisonRow,
    Hopeless,
    compare,
)
from graphpipe.planner.constraints import Constraints
from graphpipe.planner.search import plan
from graphpipe.zoo.job import Job
from graphpipe.zoo.load import load_job
from graphpipe.zoo.mmt import mmt

PER_DEVICE = {"mmt": 16, "dlrm": 256, "candle-uno": 1024}
"""Samples of a mini-batch per device, by model of the zoo."""
DEVICE = "v100-16gb"
PER_NODE = 8
FREE_MEMORY = 2**50
SAME_GRAPH = "ours on its graph"
ABLATION = "ablation"


class Cell(NamedTuple):
    """One input: the memory is that of the device, or without limit."""

    model: str
    devices: int
    batch_size: int
    limited: bool

    @property
    def cluster(self) -> Cluster:
        nodes, per_node = max(1, self.devices // PER_NODE), min(PER_NODE, self.devices)
        cluster = named_cluster(f"{nodes}x{per_node}x{DEVICE}")
        if self.limited:
            return cluster
        free = [d.model_copy(update={"memory_bytes": FREE_MEMORY}) for d in cluster.devices]
        return cluster.model_copy(update={"devices": tuple(free)})

    def holds(self, row: ComparisonRow) -> bool:
        """Whether a row is about this input."""
        return (row.model, row.devices, row.batch_size, row.memory_bytes < FREE_MEMORY) == self


def graph_of(job: Job) -> tuple[ModelGraph, CostTable]:
    """Graph and costs of a job, without a value of the model being made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = capture(
            (meta := job.on_meta()).build_model(),
            meta.args,
            meta.kwargs,
            targets=meta.targets,
            loss_fn=meta.loss_fn,
            **job.capture_options,
        )
    graph = graph.model_copy(update={"name": job.name})
    return graph, estimate(graph, named_cluster(f"1x1x{DEVICE}"))


@cache
def zoo_graph(model: str) -> tuple[ModelGraph, CostTable]:
    """Graph and costs of a model of the zoo."""
    return graph_of(load_job(f"zoo:{model}"))


def show(rows: Sequence[ComparisonRow]) -> None:
    """One line a planner."""
    for row in rows:
        name = f"{row.planner} ({row.variant})"
        if row.iteration_ns is None:
            print(f"  {name:32} no plan: {row.note}")
            continue
        sizes = "/".join(str(b) for b in row.micro_batches)
        search = "" if row.search_seconds is None else f"{row.search_seconds:9.3f}"
        print(
            f"  {name + ('*' if row.fused else ''):32} {row.iteration_ns / 1e6:10.2f} ms"
            f" {row.throughput or 0:10.0f}/s  x{row.ratio or 0:5.3f}"
            f"  gap {row.lower_bound_gap or 0:6.1%}  bubble {row.bubble or 0:5.1%}"
            f"  {row.stages:3} stages, depth {row.depth:2},"
            f" R {row.copies:2}, b {sizes:12} {(row.peak_memory_bytes or 0) / 2**30:6.2f} GiB"
            f"  search {search} s"
        )
        if row.gap_parts:
            shown = " ".join(f"{part} {value * 1e3:+.2f}" for part, value in row.gap_parts.items())
            bound = f"{row.lower_bound_ns / 1e6:.2f} ms ({row.binding})"
            print(f"    above the bound of {bound}, in ms: {shown}")
    sys.stdout.flush()


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """The inputs in order, small ones first."""
    for model in args.models:
        for devices in args.devices:
            for fraction in args.fractions:
                for limited in args.memory:
                    size = max(1, round(PER_DEVICE[model] * fraction)) * devices
                    yield Cell(model, devices, size, limited)


def run_cell(cell: Cell, args: argparse.Namespace, hopeless: Hopeless) -> tuple[Compared, ...]:
    """Every planner on one input."""
    limit = "16 GB" if cell.limited else "free memory"
    print(f"\n{cell.model}, {cell.devices} devices, B = {cell.batch_size}, {limit}")
    graph, costs = zoo_graph(cell.model)
    found = compare(
        graph,
        costs,
        cell.cluster,
        cell.batch_size,
        planners=args.planners,
        time_limit=args.time_limit,
        hopeless=hopeless,
    )
    show([item.row for item in found])
    return found


def same_graph(cell: Cell, item: Compared) -> ComparisonRow | None:
    """Our search on exactly the units that a baseline was given, with the ratio of CPU times."""
    if item.row.search_seconds is None:
        return None
    graph, costs = zoo_graph(cell.model)
    groups = [[graph.ops[op].name for op in ops] for ops in item.units.members if len(ops) > 1]
    start = time.process_time()
    best = plan(
        graph,
        costs,
        cell.cluster,
        batch_size=cell.batch_size,
        constraints=Constraints(together=groups),
    )
    taken = time.process_time() - start
    assert best.prediction is not None
    whole, single = item.row.search_seconds / taken, (item.row.longest_seconds or 0) / taken
    print(
        f"  search on the {item.row.units} units of {item.row.planner}: ours {taken:.3f} s,"
        f" theirs {item.row.search_seconds:.3f} s over all sizes (x{whole:.1f}),"
        f" {item.row.longest_seconds or 0:.3f} s for one size (x{single:.1f})"
    )
    return item.row.model_copy(
        update={
            "planner": OURS,
            "variant": f"{SAME_GRAPH}: {item.row.planner}",
            "search_seconds": taken,
            "longest_seconds": None,
            "iteration_ns": best.prediction.iteration_ns,
            "throughput": cell.batch_size * 1e9 / best.prediction.iteration_ns,
            "ratio": None,
            "note": f"{whole:.1f} times less than theirs over all micro-batch sizes, "
            f"{single:.1f} times less than theirs for one",
        }
    )


def ablations() -> Iterator[ComparisonRow]:
    """Branches at a fixed size, and micro-batch sizes, graph against sequence."""
    devices = 8
    cluster = Cell("", devices, 1, True).cluster
    batch_size = PER_DEVICE["mmt"] * devices
    for branches in (2, 4, 8, 16):
        depths = (32 // branches,) * branches
        graph, costs = graph_of(mmt(depths=depths, name=f"mmt-{branches}-branches"))
        print(f"\n{graph.name}, {devices} devices, B = {batch_size}, one copy, no replicas")
        sizes = [b for b in (1, 2, 4, 8, 16, 32) if b <= batch_size]
        for size in (None, *(sizes if branches == 4 else ())):
            times = {}
            for family in ("graph", "sequential"):
                try:
                    best = plan(
                        graph,
                        costs,
                        cluster,
                        batch_size=batch_size,
                        families=(family,),
                        copies=1,
                        replicas=False,
                        micro_batches=None if size is None else [size],
                    )
                except GraphPipeError as error:
                    print(f"  {family}: {error.what}")
                    continue
                assert best.prediction is not None
                times[family] = best.prediction.iteration_ns
                yield ComparisonRow(
                    model=graph.name,
                    planner=family,
                    variant=f"{ABLATION}: micro-batch {size or 'free'}",
                    devices=devices,
                    batch_size=batch_size,
                    memory_bytes=cluster.devices[0].memory_bytes,
                    units=0,
                    iteration_ns=times[family],
                    throughput=batch_size * 1e9 / times[family],
                    bubble=best.prediction.bubble,
                    depth=best.prediction.depth,
                    stages=len(best.stages),
                    copies=1,
                    micro_batches=tuple(sorted({stage.micro_batch for stage in best.stages})),
                    peak_memory_bytes=max(best.prediction.peak_memory),
                )
            if len(times) == 2:
                ratio = times["sequential"] / times["graph"]
                print(
                    f"  micro-batch {size or 'free':>4}: graph {times['graph'] / 1e6:9.2f} ms,"
                    f" sequential {times['sequential'] / 1e6:9.2f} ms, x{ratio:.3f}"
                )


def summary(rows: Sequence[ComparisonRow]) -> None:
    """Least and largest ratio to each planner, and where."""
    print("\nour throughput over theirs")
    for name in PLANNERS[1:]:
        mine = [r for r in rows if r.planner == name and r.ratio is not None]
        if mine:
            low, high = (pick(mine, key=lambda r: r.ratio or 0) for pick in (min, max))
            places = [f"x{r.ratio:.3f} ({r.model}, {r.devices})" for r in (low, high)]
            below = sum(r.ratio < 1 for r in mine if r.ratio is not None)
            print(f"  {name:16} {places[0]} to {places[1]}; below 1 in {below} of {len(mine)}")


def page(rows: Sequence[ComparisonRow]) -> str:
    """The rows as a page of the documentation: a table a model, then search times."""
    command = "python benchmarks/planner.py --json planner.json --markdown planner.md"
    lines = [
        "# Plans and search times",
        "",
        f"Made by `{command}` on {date.today().isoformat()}, {platform.machine()}, Python "
        f"{platform.python_version()}. Search times are CPU seconds.",
        "",
        f"Nodes of {PER_NODE} {DEVICE}; throughput is simulated. A column named after a planner is "
        "our throughput over its. `*`: it got a graph with its chains fused; `-`: it has no plan "
        "that fits. *gap* is our iteration time above the lower bound, *peak* the fullest device.",
    ]
    plain = [row for row in rows if not row.variant.startswith((SAME_GRAPH, ABLATION))]
    names = [name for name in PLANNERS[1:] if any(row.planner == name for row in plain)]
    for model in dict.fromkeys(row.model for row in plain):
        head = ["devices", "B", "memory", "samples/s", "gap", "bubble", "peak", "search", *names]
        lines += ["", f"## {model}", "", _line(head), _line(["---:"] * len(head))]
        for ours in (row for row in plain if row.model == model and row.planner == OURS):
            key = (ours.devices, ours.batch_size, ours.memory_bytes)
            others = {
                row.planner: row
                for row in plain
                if row.model == model and (row.devices, row.batch_size, row.memory_bytes) == key
            }
            limited = "limited" if ours.memory_bytes < FREE_MEMORY else "free"
            figures = [
                f"{ours.throughput or 0:.0f}",
                f"{ours.lower_bound_gap or 0:.1%}",
                f"{ours.bubble or 0:.1%}",
                f"{(ours.peak_memory_bytes or 0) / 2**30:.1f} GiB",
                f"{ours.search_seconds or 0:.2f} s",
            ]
            ratios = [_ratio(others.get(name)) for name in names]
            lines.append(_line([str(key[0]), str(key[1]), limited, *figures, *ratios]))
    same = [row for row in rows if row.variant.startswith(SAME_GRAPH)]
    if same:
        lines += ["", "## Search on the identical graph", ""]
        lines += [_line(["model", "devices", "units", "theirs", "ours", ""])]
        lines += [_line(["---", "---:", "---:", "---", "---:", "---"])]
        for row in same:
            theirs = row.variant.removeprefix(f"{SAME_GRAPH}: ")
            spent = f"{row.search_seconds or 0:.3f} s"
            cells = [row.model, str(row.devices), str(row.units), theirs, spent, row.note]
            lines.append(_line(cells))
    swept = [row for row in rows if row.variant.startswith(ABLATION)]
    if swept:
        lines += ["", "## Graph against sequence, one copy, no replicas", ""]
        lines += [_line(["model", "micro-batch", "family", "ms", "bubble", "depth", "peak"])]
        lines += [_line(["---", "---:", "---", "---:", "---:", "---:", "---:"])]
        for row in swept:
            figures = [
                f"{(row.iteration_ns or 0) / 1e6:.2f}",
                f"{row.bubble or 0:.1%}",
                str(row.depth),
                f"{(row.peak_memory_bytes or 0) / 2**30:.1f} GiB",
            ]
            size = row.variant.rsplit(" ", 1)[1]
            lines.append(_line([row.model, size, row.planner, *figures]))
    return "\n".join(lines) + "\n"


def _ratio(row: ComparisonRow | None) -> str:
    if row is None or row.ratio is None:
        return "-"
    return f"{row.ratio:.2f}{'*' if row.fused else ''}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="file of the rows; existing cells are kept")
    parser.add_argument("--markdown", type=Path, help="file of a page with all rows")
    parser.add_argument("--models", type=_names, default=list(PER_DEVICE))
    parser.add_argument("--devices", type=_numbers, default=[4, 8, 16, 32])
    parser.add_argument("--fractions", type=_fractions, default=[1.0, 0.25])
    parser.add_argument("--memory", type=_memory, default=[True, False])
    parser.add_argument("--planners", type=_names, default=list(PLANNERS))
    parser.add_argument("--time-limit", type=float, default=60.0, help="CPU seconds a baseline")
    parser.add_argument("--only", choices=["cells", "search", "ablations", "none"])
    args = parser.parse_args()
    rows: list[ComparisonRow] = []
    if args.json is not None and args.json.exists():
        rows = list(Comparison.load(args.json).rows)

    def keep(new: Sequence[ComparisonRow]) -> None:
        rows.extend(new)
        if args.json is not None:
            Comparison(rows=tuple(rows)).save(args.json)

    hopeless = Hopeless()
    if args.only in (None, "cells"):
        for cell in cells(args):
            if not any(cell.holds(row) and row.planner == CHAIN for row in rows):
                keep([item.row for item in run_cell(cell, args, hopeless)])
        summary(rows)
    if args.only in (None, "search"):
        print("\nsearch time on the identical graph, CPU seconds")
        args.planners = [name for name in ("pipedream", "piper") if name in args.planners]
        for model in args.models:
            cell = Cell(model, max(args.devices), PER_DEVICE[model] * max(args.devices), True)
            for item in run_cell(cell, args, hopeless)[1:]:
                row = same_graph(cell, item)
                keep([] if row is None else [row])
    if args.only in (None, "ablations"):
        for row in ablations():
            keep([row])
    if args.markdown is not None:
        args.markdown.write_text(page(rows), encoding="utf-8")


def _names(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _numbers(text: str) -> list[int]:
    return [int(item) for item in _names(text)]


def _fractions(text: str) -> list[float]:
    return [float(item) for item in _names(text)]


def _memory(text: str) -> list[bool]:
    known = {"limited": True, "free": False}
    return [known[item] for item in _names(text)]


if __name__ == "__main__":
    main()
