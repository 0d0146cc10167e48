"""A vision tower and a language model on the same devices: our plans against three layouts.

``python benchmarks/shared_devices.py [--devices 8,16,32] [--images 1,8,32] [--tower frozen,trained]
[--per-device 8] [--budget 800] [--time-limit 600] [--graphs DIR] [--json FILE] [--markdown FILE]``

The model has a ViT-L tower of 24 layers, a projector and a 7B decoder of 32 layers; costs are
estimated for H100 devices, eight to a node, in mixed precision with AdamW. Ours is what the
planner finds. It stands against the best plan of three kinds:

- (a) the tower before the first stage of a chain;
- (b) the tower on devices of its own, as replicas, and a chain of the language model on the rest;
- (c) the tower replicated on every device of a chain of the language model.

Each of the three has all other freedoms that ours has, and the same budget: copies, micro-batch
sizes (the tower's own too), recomputation by stage, slack, uneven cuts, the order of tasks on a
device. Two more columns show where a gain lies: *colocated* is the best with one trunk stage a
device (the tower's stages anywhere on them), *interleaved* the best with several trunk stages a
device and the tower before the first. All times are simulated with contention. Every plan of
ours is validated and run on the emulator's virtual clock, which must give what the simulator says.

``--json`` is written after every cell, and cells that it already holds are not run again;
``--graphs`` keeps captured graphs from one run to the next.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from graphpipe.cost.analytic import estimate
from graphpipe.cost.cluster import Cluster
from graphpipe.cost.table import CostTable
from graphpipe.errors import GraphPipeError
from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.plan.validate import problems_of
from graphpipe.planner.colocate import LAYOUTS
from graphpipe.planner.search import make_space, plan
from graphpipe.planner.seeds import Freedom
from graphpipe.planner.shared_search import better
from graphpipe.runtime.emulate import emulate
from graphpipe.simulate.simulator import simulate
from graphpipe.zoo.llava import llava

KIND = "h100-sxm"
REPLICAS = (1, 2, 3, 4, 5, 6, 8, 16, 32)
RIVALS = {
    "a": "tower first in a chain",
    "b": "tower on devices of its own",
    "c": "tower on every device",
}
Row = dict[str, Any]


@cache
def model(images: int, tower: str, kept: Path | None) -> tuple[ModelGraph, CostTable]:
    """Graph and costs; captured on the meta device, once."""
    file = None if kept is None else kept / f"llava-{images}-{tower}.json"
    if file is not None and file.exists():
        graph = ModelGraph.load(file)
        return graph, estimate(graph, KIND, precision="bf16-mixed")
    job = llava(images=images, frozen=tower == "frozen").on_meta()
    graph = capture(
        job.build_model(), job.args, dict(job.kwargs), targets=job.targets, loss_fn=job.loss_fn
    )
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        graph.save(file)
    return graph, estimate(graph, KIND, precision="bf16-mixed")


def seconds(found: Plan | None) -> float | None:
    """Simulated iteration; None where nothing fits."""
    if found is None or found.prediction is None:
        return None
    return found.prediction.iteration_ns / 1e9


def restricted(
    graph: ModelGraph,
    costs: CostTable,
    cluster: Cluster,
    batch: int,
    layouts: Sequence[str],
    turns: Sequence[int],
    options: argparse.Namespace,
) -> Plan | None:
    """The best plan with these layouts of the tower and so many trunk stages a device."""
    space = make_space(graph, costs, cluster, batch_size=batch)
    world = cluster.world_size
    copies = tuple(r for r in range(1, world + 1) if world % r == 0)
    freedom = Freedom(copies, replicas=tuple(r for r in REPLICAS if r <= world))
    return better(
        space,
        freedom,
        None,
        layouts=layouts,
        turns=turns,
        budget=2 * options.budget,
        stop=_limit(options.time_limit),
    )


def _limit(most: float) -> Callable[[], bool]:
    """Whether ``most`` CPU seconds have passed from now."""
    end = time.process_time() + most
    return lambda: time.process_time() > end


def cell(images: int, tower: str, devices: int, options: argparse.Namespace) -> Row:
    """One row."""
    graph, costs = model(images, tower, options.graphs)
    cluster = Cluster.uniform(KIND, nodes=max(1, devices // 8), per_node=min(8, devices))
    batch = options.per_device * devices
    start = time.process_time()
    ours = plan(
        graph,
        costs,
        cluster,
        batch_size=batch,
        budget=options.budget,
        time_limit=options.time_limit,
    )
    spent = time.process_time() - start
    assert ours.prediction is not None

    def best(layouts: Sequence[str], turns: Sequence[int]) -> float | None:
        return seconds(restricted(graph, costs, cluster, batch, layouts, turns, options))

    try:
        chain = seconds(
            plan(
                graph,
                costs,
                cluster,
                batch_size=batch,
                families=("sequential",),
                budget=options.budget,
                time_limit=options.time_limit,
            )
        )
    except GraphPipeError:
        chain = None
    first = [item for item in (chain, best(("chain",), (1,))) if item is not None]
    rivals = {
        "a": min(first, default=None),
        "b": best(("apart",), (1,)),
        "c": best(("everywhere",), (1,)),
    }
    nearest = min((value for value in rivals.values() if value is not None), default=None)
    iteration = ours.prediction.iteration_ns / 1e9
    measured = emulate(ours, clock="virtual", processes=False)
    return {
        "images": images,
        "tower": tower,
        "devices": devices,
        "batch_size": batch,
        "ours_seconds": iteration,
        "rivals_seconds": rivals,
        "colocated_seconds": best([name for name in LAYOUTS if name != "apart"], (1,)),
        "interleaved_seconds": best(("chain",), (2, 3, 4, 6, 8)),
        "speedup": None if nearest is None else nearest / iteration,
        "bubble": ours.prediction.bubble,
        "lower_bound_seconds": ours.prediction.lower_bound_ns / 1e9,
        "copies": ours.copies,
        "stages": len(ours.stages),
        "stages_a_device": len(ours.stages) * ours.copies / devices,
        "peak_memory_bytes": max(ours.prediction.peak_memory),
        "memory_bytes": cluster.devices[0].memory_bytes,
        "valid": not list(problems_of(ours, graph)),
        "emulated_equal": measured.iteration_ns == simulate(ours, network="channel").iteration_ns,
        "search_cpu_seconds": spent,
    }


HEADINGS = (
    "images", "tower", "devices", "ours s", "(a) s", "(b) s", "(c) s", "best / ours",
    "colocated s", "interleaved s", "bubble", "peak GB", "search CPU s",
)  # fmt: skip


def cells_of(row: Row) -> tuple[str, ...]:
    """A row as text, in the order of ``HEADINGS``."""

    def number(value: float | None) -> str:
        return "none" if value is None else f"{value:.3f}"

    rivals = [number(row["rivals_seconds"][name]) for name in RIVALS]
    return (
        str(row["images"]),
        row["tower"],
        str(row["devices"]),
        number(row["ours_seconds"]),
        *rivals,
        number(row["speedup"]),
        number(row["colocated_seconds"]),
        number(row["interleaved_seconds"]),
        f"{100 * row['bubble']:.0f} %",
        f"{row['peak_memory_bytes'] / 1e9:.1f}",
        f"{row['search_cpu_seconds']:.1f}",
    )


def markdown(rows: Sequence[Row], options: argparse.Namespace) -> str:
    """The page of the documentation."""
    speedups = [row["speedup"] for row in rows if row["speedup"] is not None]
    lines = [
        "# Shared devices",
        "",
        "A vision-language model on H100 devices, eight to a node: a ViT-L tower of 24 layers, a",
        "projector, a 7B decoder of 32 layers; estimated costs, mixed precision, AdamW,",
        f"{options.per_device} samples of a mini-batch for each device. Seconds of a simulated",
        "iteration, with contention.",
        "",
        "Ours is the plan that the planner finds; (a) has the tower before the first stage of a",
        "chain, (b) the tower on devices of its own, (c) the tower replicated on every device.",
        "Each of the three has all other freedoms that ours has (copies, micro-batch sizes,",
        "recomputation by stage, slack, uneven cuts, order of tasks) and the same budget.",
        "*Colocated* is the best with one trunk stage a device, *interleaved* with several and the",
        "tower before the first: what each brings alone.",
        "",
        "    python benchmarks/shared_devices.py "
        "--json FILE --markdown docs/measured/shared-devices.md",
        "",
        f"Budget {options.budget} (the default search has 800), at most {options.time_limit:g} CPU",
        "seconds for each search; no search came near. "
        f"{date.today().isoformat()}, Python {platform.python_version()} on {platform.machine()}.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
    ]
    lines += ["| " + " | ".join(cells_of(row)) + " |" for row in rows]
    lines += [
        "",
        f"Best of the three over ours: {min(speedups):.3f} to {max(speedups):.3f}."
        if speedups
        else "No rival fits.",
        f"Plans of ours that pass validation: {sum(row['valid'] for row in rows)} of {len(rows)};"
        " whose emulation on the virtual clock equals the simulation to the nanosecond:"
        f" {sum(row['emulated_equal'] for row in rows)} of {len(rows)}.",
    ]
    done = {(row["images"], row["tower"], row["devices"]) for row in rows}
    missing = [
        f"{images} images, {tower}, {devices} devices"
        for tower in options.tower.split(",")
        for images in map(int, options.images.split(","))
        for devices in map(int, options.devices.split(","))
        if (images, tower, devices) not in done
    ]
    if missing:
        lines += ["", "Not run yet: " + "; ".join(missing) + "."]
    for tower in dict.fromkeys(row["tower"] for row in rows):
        mine = [row for row in rows if row["tower"] == tower]
        lines += ["", f"Where the gain lies, tower {tower}:", ""]
        for row in mine:
            nearest = min(
                (value for value in row["rivals_seconds"].values() if value is not None),
                default=None,
            )
            if nearest is None:
                continue

            def gain(value: float | None, nearest: float = nearest) -> str:
                return "none" if value is None else f"{100 * (nearest / value - 1):+.0f} %"

            lines.append(
                f"- {row['images']} images, {row['devices']} devices: colocation alone"
                f" {gain(row['colocated_seconds'])}, interleaving alone"
                f" {gain(row['interleaved_seconds'])}, both {gain(row['ours_seconds'])};"
                f" {row['copies']} copies, {row['stages_a_device']:.1f} stages a device."
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="8,16,32")
    parser.add_argument("--images", default="1,8,32", help="images of a sample")
    parser.add_argument("--tower", default="frozen,trained")
    parser.add_argument("--per-device", type=int, default=8, help="samples of a mini-batch each")
    parser.add_argument("--budget", type=int, default=800, help="of each search, see plan()")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds of each search")
    parser.add_argument("--graphs", type=Path, help="folder to keep captured graphs in")
    parser.add_argument("--json", type=Path, help="file for the rows; what it holds is not rerun")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    parser.add_argument("--no-run", action="store_true", help="only show what --json holds")
    options = parser.parse_args()
    rows: list[Row] = []
    if options.json is not None and options.json.exists():
        rows = json.loads(options.json.read_text(encoding="utf-8"))
    done = {(row["images"], row["tower"], row["devices"]) for row in rows}
    print("  ".join(HEADINGS), flush=True)
    for row in rows:
        print("  ".join(cells_of(row)))
    for tower in options.tower.split(","):
        for images in (int(text) for text in options.images.split(",")):
            for devices in (int(text) for text in options.devices.split(",")):
                if (images, tower, devices) in done or options.no_run:
                    continue
                row = cell(images, tower, devices, options)
                rows.append(row)
                print("  ".join(cells_of(row)), flush=True)
                if options.json is not None:
                    options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.markdown is not None:
        rows.sort(key=lambda row: (row["tower"], row["images"], row["devices"]))
        options.markdown.write_text(markdown(rows, options), encoding="utf-8")


if __name__ == "__main__":
    main()
