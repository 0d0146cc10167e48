"""A vision tower and a language model on the same devices: our plans against three layouts.

    python benchmarks/shared_devices.py [--devices 8,16,32] [--models llava,llava-trained,llava-8]

(a) the tower before the first stage of a chain: one stage after the other;
(b) the tower on devices of its own, replicated, and a chain of the language model on the rest;
(c) the tower replicated on every device, and the same chain over all of them.

Each of the three is tried with every number of copies, several micro-batch sizes and, for
(b), every share of the devices, and keeps the best that fits the memory. All times are
simulated with contention on the same estimated costs of H100 devices, eight to a node.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence

from graphpipe.cost.analytic import estimate
from graphpipe.cost.catalogue import device
from graphpipe.cost.cluster import Cluster
from graphpipe.cost.table import CostTable
from graphpipe.errors import GraphPipeError
from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.assemble import StageChoice, assemble
from graphpipe.plan.plan import Plan
from graphpipe.planner.constructive import cut
from graphpipe.planner.search import make_space, plan
from graphpipe.simulate.predict import with_prediction
from graphpipe.zoo.load import load_job

KIND = "h100-sxm"
TOWER = ("patches", "tower", "projector")
"""Top-level modules of the zoo's LLaVA that belong to the vision tower."""


def seconds(found: Plan | None) -> float:
    """Simulated iteration; infinite where nothing fits."""
    if found is None or found.prediction is None:
        return float("inf")
    return found.prediction.iteration_ns / 1e9


def fits(found: Plan) -> bool:
    assert found.prediction is not None
    return all(
        peak <= item.memory_bytes
        for peak, item in zip(found.prediction.peak_memory, found.cluster.devices, strict=True)
    )


def layouts(
    graph: ModelGraph, costs: CostTable, cluster: Cluster, batch: int, everywhere: bool
) -> Iterator[Plan]:
    """Plans of kind (b), or (c) with ``everywhere``."""
    space = make_space(graph, costs, cluster, batch_size=batch)
    units = space.units
    tower = [
        u
        for u, ops in enumerate(units.members)
        if all(graph.ops[op].module.split(".")[0] in TOWER for op in ops)
    ]
    rest = [u for u in range(len(units)) if u not in set(tower)]
    world = cluster.world_size
    for copies in (r for r in (1, 2, 4, 8, 16) if world % r == 0 and world // r >= 2):
        devices = world // copies
        shares = [0] if everywhere else [k for k in (1, 2, 4, 8) if k < devices]
        for share in shares:
            for size in (1, 2, 4):
                yield from _one(space, tower, rest, copies, devices, share, size, batch)


def _one(
    space: object,
    tower: Sequence[int],
    rest: Sequence[int],
    copies: int,
    devices: int,
    share: int,
    size: int,
    batch: int,
) -> Iterator[Plan]:
    units, cluster = space.units, space.cluster  # type: ignore[attr-defined]
    forward, backward = units.times(KIND, size)
    work = [float(f + b) for f, b in zip(forward, backward, strict=True)]
    parts = devices - share
    found = cut(list(rest), {1: work}, [1.0] * parts)
    if found is None:
        return
    slots = [tuple(c * devices + i for c in range(copies)) for i in range(devices)]
    vision = slots[:share] if share else slots
    chain = slots[share:]
    names = units.graph.ops

    def ops(members: Sequence[int]) -> tuple[str, ...]:
        return tuple(names[op].name for u in members for op in units.members[u])

    for recompute in (False, True):
        choices = [
            StageChoice(
                ops(tower), size, len(vision),
                tuple(slot[c] for c in range(copies) for slot in vision),
                recompute=recompute, slack=1,
            )
        ]  # fmt: skip
        for part in range(max(found.assign[u] for u in rest) + 1):
            members = [u for u in rest if found.assign[u] == part]
            if members:
                choices.append(
                    StageChoice(ops(members), size, 1, chain[part], recompute=recompute, slack=1)
                )
        try:
            made = with_prediction(
                assemble(
                    units.graph, units.costs, cluster, choices, batch_size=batch, copies=copies
                )
            )
        except GraphPipeError:
            continue
        if fits(made):
            yield made


def compare(name: str, devices: Sequence[int], per_device: int) -> list[dict[str, object]]:
    """Rows of one model."""
    job = load_job(f"zoo:{name}").on_meta()
    graph = capture(
        job.build_model(), job.args, dict(job.kwargs), targets=job.targets, loss_fn=job.loss_fn
    )
    costs = estimate(graph, device(KIND), precision="bf16-mixed")
    rows: list[dict[str, object]] = []
    for count in devices:
        cluster = Cluster.uniform(KIND, nodes=max(1, count // 8), per_node=min(8, count))
        batch = per_device * count
        start = time.process_time()
        ours = plan(graph, costs, cluster, batch_size=batch)
        spent = time.process_time() - start
        try:
            first: Plan | None = plan(
                graph, costs, cluster, batch_size=batch, families=("sequential",)
            )
        except GraphPipeError:
            first = None
        apart = min(
            map(seconds, layouts(graph, costs, cluster, batch, False)), default=float("inf")
        )
        spread = min(
            map(seconds, layouts(graph, costs, cluster, batch, True)), default=float("inf")
        )
        others = (seconds(first), apart, spread)
        row: dict[str, object] = {
            "model": name,
            "devices": count,
            "batch_size": batch,
            "ours_seconds": seconds(ours),
            "tower_first_seconds": others[0],
            "tower_apart_seconds": others[1],
            "tower_everywhere_seconds": others[2],
            "speedup_over_best": min(others) / seconds(ours),
            "search_seconds": spent,
        }
        rows.append(row)
        print(
            f"{name:14} {count:3} devices  ours {seconds(ours):8.3f} s   (a) {others[0]:8.3f}"
            f"   (b) {others[1]:8.3f}   (c) {others[2]:8.3f}   "
            f"best of the three / ours {min(others) / seconds(ours):.3f}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="8,16,32")
    parser.add_argument("--models", default="llava,llava-trained,llava-8")
    parser.add_argument("--per-device", type=int, default=8, help="samples of a mini-batch each")
    parser.add_argument("--json", help="file for the rows")
    options = parser.parse_args()
    counts = [int(text) for text in options.devices.split(",")]
    rows = [
        row
        for name in options.models.split(",")
        for row in compare(name, counts, options.per_device)
    ]
    if options.json:
        with open(options.json, "w", encoding="utf-8") as out:
            json.dump(rows, out, indent=1)


if __name__ == "__main__":
    main()
