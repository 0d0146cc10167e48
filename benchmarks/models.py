"""Which real models can be captured as they are, what that costs, and how they are planned.

    python benchmarks/models.py [--only clip,whisper] [--json FILE] [--markdown FILE]

The models of ``benchmarks/library.py`` (transformers, in published sizes) and of the zoo are
captured on the meta device and planned for eight H100 in bf16 mixed precision with AdamW.
Capture and search times are CPU seconds of one core; the first capture of a process also loads
what torch.export needs, about 3 s, so measure each model in a process of its own (``--only``). A
row is written to the JSON file as soon as it is known, and rows that are there are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.library import LIBRARY

from graphpipe.cost.analytic import estimate
from graphpipe.cost.cluster import Cluster
from graphpipe.errors import GraphPipeError
from graphpipe.graph.cut import partition_ops
from graphpipe.plan.plan import Plan
from graphpipe.planner.search import plan
from graphpipe.programs.planning import capture_job
from graphpipe.zoo.job import Job
from graphpipe.zoo.load import load_job

KIND, DEVICES = "h100-sxm", 8
ZOO = ("resnet", "inception", "unet", "dlrm", "mmt", "candle-uno")


def job_of(name: str) -> Job:
    return load_job(name) if name.startswith("zoo:") else LIBRARY[name]()


def measured(name: str) -> dict[str, Any]:
    """One row of the table."""
    job = job_of(name)
    warnings.simplefilter("ignore")
    start = time.process_time()
    graph = capture_job(job)
    capture_seconds = time.process_time() - start
    cluster = Cluster.uniform(KIND, nodes=1, per_node=DEVICES)
    costs = estimate(graph, cluster, optimizer="adamw", precision="bf16-mixed")
    assert job.batch_size is not None
    start = time.process_time()
    error, found = "", None
    try:
        found = plan(graph, costs, cluster, batch_size=job.batch_size)
    except GraphPipeError as stopped:
        error = str(stopped)
    parameters = [item for item in graph.parameters if not item.is_buffer]
    return {
        "model": name,
        "parameters": sum(item.numel for item in parameters),
        "trained": sum(item.numel for item in parameters if item.trainable),
        "ops": len(graph.ops),
        "cut": len(partition_ops(graph)),
        "capture_seconds": capture_seconds,
        "declared": list(job.capture_options.get("per_sample_ops", ())),
        "coupled": sum(op.coupled for op in graph.ops),
        "reductions": sorted({term.reduction or "coupled" for term in graph.loss_terms}),
        "batch_size": job.batch_size,
        "search_seconds": time.process_time() - start,
        "error": error,
        **({} if found is None else planned(found)),
    }


def planned(found: Plan) -> dict[str, Any]:
    """What a plan says in a few figures."""
    assert found.prediction is not None
    return {
        "stages": len(found.stages),
        "copies": found.copies,
        "replicas": sorted({stage.replicas for stage in found.stages}),
        "micro_batches": sorted({stage.micro_batch for stage in found.stages}),
        "devices_used": len({d for stage in found.stages for d in stage.devices}),
        "iteration_seconds": found.prediction.iteration_ns / 1e9,
        "bubble": found.prediction.bubble,
        "peak_gib": max(found.prediction.peak_memory) / 2**30,
    }


def listed(values: list[int]) -> str:
    return ", ".join(str(value) for value in values)


def markdown(rows: list[dict[str, Any]], date: str) -> str:
    """The rows as a page of the documentation."""
    lines = [
        "# Real models: capture and plan",
        "",
        f"Made on {date} by `python benchmarks/models.py --json out/models.json --markdown "
        "docs/measured/models.md`, one core of a virtual machine (x86-64), torch 2.13 on CPU, "
        f"transformers 5.24. Plans for {DEVICES} {KIND} in bf16 mixed precision with AdamW; "
        "their times are simulated on estimated costs. Capture and search are CPU seconds, each "
        "model in a process of its own; a capture includes about 3 s in which torch.export "
        "is loaded.",
        "",
        "| model | parameters | of these trained | ops | stages are cut from | capture | search |"
        " B | stages | copies | replicas | micro-batches | devices | step | fullest device |",
        "|---|" + "---:|" * 14,
    ]
    for row in rows:
        plan_columns = "no plan fits | | | | | | "
        if not row["error"]:
            plan_columns = (
                f"{row['stages']} | {row['copies']} | {listed(row['replicas'])} | "
                f"{listed(row['micro_batches'])} | {row['devices_used']} | "
                f"{1000 * row['iteration_seconds']:.0f} ms | {row['peak_gib']:.1f} GiB"
            )
        lines.append(
            f"| `{row['model']}` | {row['parameters'] / 1e6:,.0f} M | "
            f"{row['trained'] / 1e6:,.0f} M | {row['ops']:,} | {row['cut']:,} | "
            f"{row['capture_seconds']:.1f} s | {row['search_seconds']:.1f} s | "
            f"{row['batch_size']:,} | {plan_columns} |"
        )
    declared = [
        f"- `{row['model']}`: " + ", ".join(f"`{name}`" for name in row["declared"])
        for row in rows
        if row["declared"]
    ]
    if declared:
        lines += ["", "Declared per sample (`per_sample_ops`):", "", *declared]
    without = [f"`{row['model']}`: {row['error']}" for row in rows if row["error"]]
    if without:
        lines += ["", "Without a plan:", "", *(f"- {text}" for text in without)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*LIBRARY, *(f"zoo:{name}" for name in ZOO)]
    parser.add_argument("--only", default=",".join(names))
    parser.add_argument("--json", type=Path, default=Path("out/models.json"))
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    known: dict[str, dict[str, Any]] = {}
    if options.json.exists():
        known = {row["model"]: row for row in json.loads(options.json.read_text())["rows"]}
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    for name in options.only.split(","):
        if name in known:
            continue
        known[name] = measured(name)
        print(name, {k: v for k, v in known[name].items() if k != "model"}, flush=True)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        ordered = [known[key] for key in names if key in known]
        options.json.write_text(json.dumps({"date": date, "rows": ordered}, indent=1) + "\n")
    if options.markdown is not None:
        rows = [known[key] for key in names if key in known]
        options.markdown.write_text(markdown(rows, date))


if __name__ == "__main__":
    main()
