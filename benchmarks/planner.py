"""Plans and search times: ours against the published planners, on the paper's three models.

``python benchmarks/planner.py [--json FILE] [--models a,b] [--devices 4,8,16,32]
[--fractions 1,0.25] [--memory limited,free] [--planners ...] [--redo ...] [--time-limit 60]
[--only PART] [--merge FILE ...] [--markdown FILE]``

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

A baseline that needs more than ``--time-limit`` CPU seconds for one input, or that refuses the
graph, gets one with its chains fused as little as that takes; the table marks it with ``*``.
``--json`` is written after every row, and rows that it already holds are not run again (except
those of planners named by ``--redo``), so that long runs can be resumed, split and merged.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from planner_page import (
    ABLATION,
    FREE_MEMORY,
    SEARCH,
    input_of,
    page,
    summary,
    with_bound_of_ours,
)

from graphpipe.cost.analytic import estimate
from graphpipe.cost.boxes import named_cluster
from graphpipe.cost.cluster import Cluster
from graphpipe.cost.table import CostTable
from graphpipe.errors import GraphPipeError
from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.planner.baselines.downsets import DownSetLimitError, enumerate_down_sets
from graphpipe.planner.baselines.inputs import unit_edges
from graphpipe.planner.compare import (
    OURS,
    PLANNERS,
    Comparison,
    ComparisonRow,
    Contest,
    Hopeless,
    with_ratios,
)
from graphpipe.planner.constraints import Constraints
from graphpipe.planner.search import plan
from graphpipe.planner.unit_graph import UnitGraph
from graphpipe.zoo.job import Job
from graphpipe.zoo.load import load_job
from graphpipe.zoo.mmt import mmt

PER_DEVICE = {"mmt": 16, "dlrm": 256, "candle-uno": 1024}
"""Samples of a mini-batch per device, by model of the zoo."""
DEVICE = "v100-16gb"
PER_NODE = 8
MOST_DOWN_SETS = 1_000_000
"""Counted no further."""


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

    @property
    def key(self) -> tuple[str, int, int, int]:
        """The input as rows name it."""
        memory = min(device.memory_bytes for device in self.cluster.devices)
        return self.model, self.devices, self.batch_size, memory

    def holds(self, row: ComparisonRow) -> bool:
        """Whether a row is about this input."""
        return (row.model, row.devices, row.batch_size, row.memory_bytes < FREE_MEMORY) == self

    def contest(self, time_limit: float, hopeless: Hopeless) -> Contest:
        """The input, ready for planners."""
        graph, costs = zoo_graph(self.model)
        return Contest(
            graph,
            costs,
            self.cluster,
            self.batch_size,
            time_limit=time_limit,
            hopeless=hopeless,
        )


class Rows:
    """The rows so far, in a file if one is given."""

    def __init__(self, path: Path | None, merge: Sequence[Path] = ()) -> None:
        self.path = path
        files = [path] if path is not None and path.exists() else []
        rows = [row for file in [*files, *merge] for row in Comparison.load(file).rows]
        self.all = list({self._key(row): row for row in rows}.values())

    def has(self, cell: Cell, planner: str, variant: str = "") -> bool:
        return any(self._same(row, cell, planner, variant) for row in self.all)

    def put(self, cell: Cell, row: ComparisonRow) -> ComparisonRow:
        """Keeps a row instead of an older one; returns it with its ratio."""
        same = row.variant if row.variant.startswith((SEARCH, ABLATION)) else ""
        self.all = [old for old in self.all if not self._same(old, cell, row.planner, same)]
        self.all.append(row)
        return self.save()[-1]

    def save(self) -> tuple[ComparisonRow, ...]:
        rows = with_ratios(with_bound_of_ours(self.all))
        if self.path is not None:
            Comparison(rows=rows).save(self.path)
        return rows

    @staticmethod
    def _key(row: ComparisonRow) -> tuple[str, int, int, int, str, str]:
        other = row.variant if row.variant.startswith((SEARCH, ABLATION)) else ""
        return (*input_of(row), row.planner, other)

    @classmethod
    def _same(cls, row: ComparisonRow, cell: Cell, planner: str, variant: str) -> bool:
        return cell.holds(row) and cls._key(row)[-2:] == (planner, variant)


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


def show(row: ComparisonRow) -> None:
    """One line for a planner, and the parts of the gap for ours."""
    name = f"{row.planner} ({row.variant})"
    if row.iteration_ns is None:
        print(f"  {name:32} no plan: {row.note}", flush=True)
        return
    sizes = "/".join(str(b) for b in row.micro_batches)
    search = "" if row.search_seconds is None else f"{row.search_seconds:9.3f}"
    print(
        f"  {name + ('*' if row.fused else ''):32} {row.iteration_ns / 1e6:10.2f} ms"
        f" {row.throughput or 0:10.0f}/s  x{row.ratio or 0:5.3f}"
        f"  gap {row.lower_bound_gap or 0:6.1%}  bubble {row.bubble or 0:5.1%}"
        f"  {row.stages:3} stages, depth {row.depth:2},"
        f" R {row.copies:2}, b {sizes:12} {(row.peak_memory_bytes or 0) / 2**30:6.2f} GiB"
        f"  search {search} s",
        flush=True,
    )
    if row.gap_parts:
        shown = " ".join(f"{part} {value * 1e3:+.2f}" for part, value in row.gap_parts.items())
        bound = f"{row.lower_bound_ns / 1e6:.2f} ms ({row.binding})"
        print(f"    above the bound of {bound}, in ms: {shown}", flush=True)


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """The inputs in order, small ones first."""
    for model in args.models:
        for devices in args.devices:
            for fraction in args.fractions:
                for limited in args.memory:
                    size = max(1, round(PER_DEVICE[model] * fraction)) * devices
                    yield Cell(model, devices, size, limited)


def run_cell(cell: Cell, args: argparse.Namespace, hopeless: Hopeless, rows: Rows) -> None:
    """Every planner on one input."""
    names = [n for n in args.planners if n in args.redo or not rows.has(cell, n)]
    if not names:
        return
    limit = "16 GB" if cell.limited else "free memory"
    print(f"\n{cell.model}, {cell.devices} devices, B = {cell.batch_size}, {limit}", flush=True)
    contest = cell.contest(args.time_limit, hopeless)
    for name in names:
        show(rows.put(cell, contest.run(name).row))


def run_search(cell: Cell, args: argparse.Namespace, hopeless: Hopeless, rows: Rows) -> None:
    """PipeDream's and Piper's optimisers against our default search on the identical graph."""
    contest = cell.contest(args.time_limit, hopeless)
    for name in ("pipedream", "piper"):
        variant = f"{SEARCH}: {name}"
        if rows.has(cell, OURS, variant):
            continue
        print(f"\n{cell.model}, {cell.devices} devices, {name}", flush=True)
        whole = _searched(cell, contest.units, f"{variant}, graph as it is")
        item = contest.run(name)
        theirs = item.row.model_copy(
            update={"variant": variant, "down_sets": _down_sets(item.units), "gap_parts": {}}
        )
        rows.put(cell, whole.model_copy(update={"note": item.row.note}))
        rows.put(cell, theirs)
        show(theirs)
        rows.put(cell, _searched(cell, item.units, variant))


def _searched(cell: Cell, units: UnitGraph, variant: str) -> ComparisonRow:
    """A row of our default search on exactly these units."""
    graph, costs = zoo_graph(cell.model)
    groups = [[graph.ops[op].name for op in ops] for ops in units.members if len(ops) > 1]
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
    print(f"  {variant}: ours {taken:.3f} s on {len(units)} units", flush=True)
    return ComparisonRow(
        model=cell.model,
        planner=OURS,
        variant=variant,
        devices=cell.devices,
        batch_size=cell.batch_size,
        memory_bytes=cell.cluster.devices[0].memory_bytes,
        units=len(units),
        down_sets=_down_sets(units),
        search_seconds=taken,
        iteration_ns=best.prediction.iteration_ns,
        throughput=cell.batch_size * 1e9 / best.prediction.iteration_ns,
    )


def _down_sets(units: UnitGraph) -> int | None:
    try:
        return len(enumerate_down_sets(len(units), unit_edges(units), limit=MOST_DOWN_SETS))
    except DownSetLimitError:
        return None


def run_ablations(rows: Rows) -> None:
    """Branches at a fixed size, and micro-batch sizes, graph against sequence."""
    devices = 8
    batch_size = PER_DEVICE["mmt"] * devices
    for branches in (2, 4, 8, 16):
        name = f"mmt-{branches}-branches"
        cell = Cell(name, devices, batch_size, True)
        swept = [b for b in (1, 2, 4, 8, 16, 32) if b <= batch_size] if branches == 4 else []
        sizes = [None, *swept]
        wanted = [(s, f) for s in sizes for f in ("graph", "sequential")]
        if all(rows.has(cell, f, _ablation(s)) for s, f in wanted):
            continue
        depths = (32 // branches,) * branches
        graph, costs = graph_of(mmt(depths=depths, name=name))
        print(f"\n{name}, {devices} devices, B = {batch_size}, one copy, no replicas", flush=True)
        for size, family in wanted:
            if rows.has(cell, family, _ablation(size)):
                continue
            try:
                best = plan(
                    graph,
                    costs,
                    cell.cluster,
                    batch_size=batch_size,
                    families=(family,),
                    copies=1,
                    replicas=False,
                    micro_batches=None if size is None else [size],
                )
            except GraphPipeError as error:
                print(f"  micro-batch {size or 'free'}: {family}: {error.what}", flush=True)
                continue
            assert best.prediction is not None
            row = ComparisonRow(
                model=name,
                planner=family,
                variant=_ablation(size),
                devices=devices,
                batch_size=batch_size,
                memory_bytes=cell.cluster.devices[0].memory_bytes,
                units=0,
                iteration_ns=best.prediction.iteration_ns,
                throughput=batch_size * 1e9 / best.prediction.iteration_ns,
                bubble=best.prediction.bubble,
                depth=best.prediction.depth,
                stages=len(best.stages),
                copies=1,
                micro_batches=tuple(sorted({stage.micro_batch for stage in best.stages})),
                peak_memory_bytes=max(best.prediction.peak_memory),
            )
            show(rows.put(cell, row))


def _ablation(size: int | None) -> str:
    return f"{ABLATION}: micro-batch {size or 'free'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="file of the rows; existing rows are kept")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="more files of rows")
    parser.add_argument("--markdown", type=Path, help="file of a page with all rows")
    parser.add_argument(
        "--commands", help="what made the rows, for the page; default: this command"
    )
    parser.add_argument("--remark", action="append", default=[], help="a paragraph of the page")
    parser.add_argument("--models", type=_names, default=list(PER_DEVICE))
    parser.add_argument("--devices", type=_numbers, default=[4, 8, 16, 32])
    parser.add_argument("--fractions", type=_fractions, default=[1.0, 0.25])
    parser.add_argument("--memory", type=_memory, default=[True, False])
    parser.add_argument("--planners", type=_names, default=list(PLANNERS))
    parser.add_argument("--redo", type=_names, default=[], help="planners whose rows are renewed")
    parser.add_argument("--time-limit", type=float, default=60.0, help="CPU seconds a baseline")
    parser.add_argument("--only", choices=["cells", "search", "ablations", "none"])
    args = parser.parse_args()
    rows = Rows(args.json, args.merge)
    hopeless = Hopeless()
    if args.only in (None, "cells"):
        for cell in cells(args):
            run_cell(cell, args, hopeless, rows)
    if args.only in (None, "search"):
        for model in args.models:
            devices = max(args.devices)
            cell = Cell(model, devices, PER_DEVICE[model] * devices, True)
            run_search(cell, args, hopeless, rows)
    if args.only in (None, "ablations"):
        run_ablations(rows)
    found = rows.save()
    print("\n" + summary(found))
    if args.markdown is not None:
        commands = args.commands or " ".join(["python", "benchmarks/planner.py", *sys.argv[1:]])
        wanted = [cell.key for cell in cells(args)]
        text = page(found, commands, wanted, args.remark)
        args.markdown.write_text(text, encoding="utf-8")


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
