"""What splitting the joins brings: chain, graph, and graph with split joins.

``python benchmarks/split_joins.py [--json FILE] [--markdown FILE] [--models a,b]
[--devices 4,8,16,32] [--samples 128,1024] [--time-limit 60]``

Nodes of eight V100-16GB, costs from the analytic estimate, every plan judged by the same
simulator. Columns:

- *chain as published*: PipeDream's planner (no copies, no slack), run as a chain;
- *best chain*: our search restricted to chains: micro-batch sizes, copies, slack;
- *graph*: our search on the graph as it is;
- *graph, joins split*: ``plan(..., split_joins=True)``: the better of graph and rewritten graph;
- *chain, joins split*: the best chain of the rewritten graph, for comparison.

Ratios are throughput over that of the chain as published, and over the best chain.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from datetime import date
from pathlib import Path
from typing import Any

from graphpipe.cost.analytic import estimate
from graphpipe.cost.boxes import named_cluster
from graphpipe.errors import GraphPipeError
from graphpipe.graph.split_joins import split_joins
from graphpipe.plan.plan import Plan
from graphpipe.planner.compare import compare
from graphpipe.planner.search import plan
from planner import DEVICE, PER_NODE, Cell, zoo_graph

CHAINS = ("chain", "sequential")
COLUMNS = (
    "chain as published", "best chain", "graph", "graph, joins split", "chain, joins split",
)  # fmt: skip


def figures(found: Plan, seconds: float) -> dict[str, Any]:
    """The figures of a plan, JSON-like."""
    assert found.prediction is not None
    return {
        "iteration_ns": found.prediction.iteration_ns,
        "throughput": found.batch_size * 1e9 / found.prediction.iteration_ns,
        "bubble": found.prediction.bubble,
        "depth": found.prediction.depth,
        "stages": len(found.stages),
        "copies": found.copies,
        "micro_batches": sorted({stage.micro_batch for stage in found.stages}),
        "peak_memory": max(found.prediction.peak_memory),
        "search_seconds": seconds,
        "split": [[item.parameter, list(item.widths)] for item in found.split_joins],
    }


def run_cell(cell: Cell, time_limit: float) -> dict[str, Any]:
    """Every column for one input."""
    graph, costs = zoo_graph(cell.model)
    split = split_joins(graph)
    split_costs = estimate(split, named_cluster(f"1x1x{DEVICE}"))
    columns: dict[str, Any] = {}
    published = compare(
        graph, costs, cell.cluster, cell.batch_size, planners=["pipedream"], time_limit=time_limit
    )
    for item in published:
        if item.row.planner == "pipedream" and item.row.iteration_ns is not None:
            columns["chain as published"] = {
                "iteration_ns": item.row.iteration_ns,
                "throughput": item.row.throughput,
                "bubble": item.row.bubble,
                "stages": item.row.stages,
                "fused": item.row.fused,
            }
    for name, given, table, options in (
        ("best chain", graph, costs, {"families": CHAINS}),
        ("graph", graph, costs, {}),
        ("graph, joins split", graph, costs, {"split_joins": split_costs}),
        ("chain, joins split", split, split_costs, {"families": CHAINS}),
    ):
        start = time.process_time()
        try:
            found = plan(given, table, cell.cluster, batch_size=cell.batch_size, **options)  # type: ignore[arg-type]
        except GraphPipeError as error:
            print(f"  {name}: {error}")
            continue
        columns[name] = figures(found, time.process_time() - start)
    return {
        "model": cell.model,
        "devices": cell.devices,
        "batch_size": cell.batch_size,
        "columns": columns,
    }


def ratio(row: dict[str, Any], name: str, base: str) -> float | None:
    """Throughput of a column over that of another; None where one has no plan."""
    columns = row["columns"]
    if name not in columns or base not in columns:
        return None
    return float(columns[base]["iteration_ns"] / columns[name]["iteration_ns"])


def cells_of(row: dict[str, Any]) -> list[str]:
    """A row of the table: milliseconds, and ratios to both chains."""
    out = [row["model"], str(row["devices"]), str(row["batch_size"] // row["devices"])]
    for name in COLUMNS:
        found = row["columns"].get(name)
        out.append("-" if found is None else f"{found['iteration_ns'] / 1e6:.2f}")
    for base in ("chain as published", "best chain"):
        for name in ("graph", "graph, joins split"):
            value = ratio(row, name, base)
            out.append("-" if value is None else f"{value:.2f}")
    return out


HEAD = (
    "model", "devices", "samples a device", *(f"{name}, ms" for name in COLUMNS),
    "graph / published", "split / published", "graph / best chain", "split / best chain",
)  # fmt: skip


def page(rows: list[dict[str, Any]], command: str) -> str:
    """A page of the documentation with all rows."""
    lines = [
        "# Splitting the join, measured",
        "",
        f"`{command}`, {date.today().isoformat()}, {platform.machine()}, CPython "
        f"{platform.python_version()}. Nodes of {PER_NODE} {DEVICE}, costs estimated, plans "
        "simulated; times of one iteration. What the columns mean stands at the top of the "
        "script; what splitting a join is, in [Splitting joins](../split-joins.md).",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + "---|" * 3 + "---:|" * (len(HEAD) - 3),
    ]
    lines += ["| " + " | ".join(cells_of(row)) + " |" for row in rows]
    lines += ["", "Which joins were split:", ""]
    for row in rows:
        found = row["columns"].get("graph, joins split", {}).get("split", [])
        what = "; ".join(f"`{name}` into {len(widths)}" for name, widths in found) or "none"
        lines.append(
            f"- {row['model']}, {row['devices']} devices, "
            f"{row['batch_size'] // row['devices']} samples a device: {what}"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="file of the rows; existing ones are kept")
    parser.add_argument("--markdown", type=Path, help="file of a page with all rows")
    parser.add_argument("--models", default="candle-uno")
    parser.add_argument("--devices", default="4,8,16,32")
    parser.add_argument("--samples", default="128,1024", help="samples of a device")
    parser.add_argument("--time-limit", type=float, default=60.0, help="CPU seconds of PipeDream")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if args.json is not None and args.json.exists():
        rows = json.loads(args.json.read_text(encoding="utf-8"))
    done = {(row["model"], row["devices"], row["batch_size"]) for row in rows}
    print(" | ".join(HEAD))
    for model in args.models.split(","):
        for samples in map(int, args.samples.split(",")):
            for devices in map(int, args.devices.split(",")):
                cell = Cell(model, devices, samples * devices, True)
                if (model, devices, cell.batch_size) not in done:
                    rows.append(run_cell(cell, args.time_limit))
                    print(" | ".join(cells_of(rows[-1])), flush=True)
                    if args.json is not None:
                        args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if args.markdown is not None:
        command = "python benchmarks/split_joins.py " + " ".join(
            f"--{name} {getattr(args, name)}" for name in ("models", "devices", "samples")
        )
        args.markdown.write_text(page(rows, command), encoding="utf-8")


if __name__ == "__main__":
    main()
