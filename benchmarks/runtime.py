"""The runtime: speed against torch.distributed.pipelining, promises of time and of memory.

``python benchmarks/runtime.py [--parts a,b] [--json FILE] [--markdown FILE] [--pairs N]
[--sizes a,b] [--workers 2,4] [--models a,b] [--devices 8,16,32] [--repeats N] [--plans DIR]``

With ``--json``, parts and rows that the file already holds from earlier runs stay, so a long
run can be made in pieces; ``--markdown`` writes a page of all of them. The parts:

- *overhead*: what a task costs beyond the stage's own forward or backward, without messages
  (one rank, one stage; the bare loop over the same micro-batches is subtracted).
- *steps*: a chain of equal layers on 2 and 4 workers, the same micro-batches, 1F1B both
  times. Ours and theirs take turns in the same processes, so that noise hits both; the ratio
  of each pair counts, its median and a 95 % bootstrap interval are printed. CPU seconds are
  those of all workers. Both step an SGD optimizer; ours also gives the loss to every rank.
- *checks*: how long the action lists of plans of 64 ranks take to build and to check.
- *promise* and *sleep*: see ``runtime_promise.py``; *memory*: see ``runtime_memory.py``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import runtime_memory
import runtime_page
import runtime_promise
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from graphpipe.cost.cluster import Cluster, Device
from graphpipe.graph.capture import capture
from graphpipe.graph.cut import partition_ops
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.actions import build_actions
from graphpipe.plan.assemble import StageChoice, assemble
from graphpipe.plan.plan import Plan
from graphpipe.plan.validate import validate
from graphpipe.runtime.launch import launch
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.runtime.stage_module import lift_state


@dataclass(frozen=True)
class Size:
    """Layers per stage, their width, samples of a micro-batch, micro-batches of a step."""

    name: str
    layers: int
    width: int
    micro_batch: int
    micro_batches: int


SIZES = (
    Size("tiny", 2, 32, 4, 8),
    Size("small", 4, 128, 8, 8),
    Size("medium", 4, 384, 16, 8),
    Size("large", 4, 768, 32, 8),
    Size("many", 4, 128, 8, 32),
)


@dataclass
class StepResult:
    """One size on one number of workers; times in seconds, ratios ours / theirs."""

    size: str
    workers: int
    pairs: int
    ours_seconds: float
    theirs_seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    ours_cpu_seconds: float
    theirs_cpu_seconds: float
    cpu_ratio: float


class Stage(nn.Module):
    """Linear layers with a non-linearity."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def build(size: Size, stages: int) -> nn.Sequential:
    """The chain, the same at every call."""
    torch.manual_seed(0)
    return nn.Sequential(*[Stage(size.layers, size.width) for _ in range(stages)])


def chain_plan(graph: ModelGraph, size: Size, stages: int) -> Plan:
    """One stage for each ``Stage`` module, 1F1B."""
    ops: list[list[str]] = [[] for _ in range(stages)]
    last = 0
    for name in partition_ops(graph):
        head = graph.op_by_name[name].module.split(".")[0]
        last = int(head) if head.isdigit() else last
        ops[last].append(name)
    cluster = Cluster(devices=tuple(Device(kind="cpu-core", memory_bytes=2**40) for _ in ops))
    return assemble(
        graph,
        None,
        cluster,
        [StageChoice(tuple(names), size.micro_batch, 1, (i,)) for i, names in enumerate(ops)],
        batch_size=size.micro_batch * size.micro_batches,
    )


def paired(size: Size, plan: Plan, graph: ModelGraph, pairs: int) -> list[tuple[float, ...]]:
    """In one worker: (ours, theirs, our CPU, their CPU) of every pair, in seconds."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(size, world)
    batch = size.micro_batch * size.micro_batches
    torch.manual_seed(1)
    x, y = torch.randn(batch, size.width), torch.randn(batch, size.width)
    pipe = Pipeline(
        model, plan, functional.mse_loss, lambda named: torch.optim.SGD(named, 1e-3), graph=graph
    )
    module = build(size, world)[rank]
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, size.micro_batches, loss_fn=functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)

    def ours() -> None:
        pipe.step((x,), targets=y)

    def theirs() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == world - 1:
            losses: list[torch.Tensor] = []
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        optimizer.step()

    for _ in range(3):
        ours()
        theirs()
    out: list[tuple[float, ...]] = []
    for pair in range(pairs):
        measured: dict[bool, tuple[float, float]] = {}
        for mine in (True, False) if pair % 2 else (False, True):
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            (ours if mine else theirs)()
            dist.barrier()
            measured[mine] = (time.perf_counter() - start, time.process_time() - cpu)
        out.append((measured[True][0], measured[False][0], measured[True][1], measured[False][1]))
    pipe.close()
    return out


def compare(size: Size, workers: int, pairs: int) -> StepResult:
    """Ours and theirs on one size."""
    model = build(size, workers)
    batch = size.micro_batch * size.micro_batches
    example = torch.zeros(batch, size.width)
    graph = capture(model, (example,), targets=example, loss_fn=functional.mse_loss)
    plan = chain_plan(graph, size, workers)
    results = launch(
        paired, workers, (size, plan, graph, pairs), timeout=300, threads=1, method="fork"
    )
    wall = [(row[0], row[1]) for row in results[0]]
    cpu = [
        (sum(rows[i][2] for rows in results), sum(rows[i][3] for rows in results))
        for i in range(pairs)
    ]
    ratios = [ours / theirs for ours, theirs in wall]
    low, high = bootstrap(ratios)
    return StepResult(
        size=size.name,
        workers=workers,
        pairs=pairs,
        ours_seconds=statistics.median(ours for ours, _ in wall),
        theirs_seconds=statistics.median(theirs for _, theirs in wall),
        ratio=statistics.median(ratios),
        ratio_low=low,
        ratio_high=high,
        ours_cpu_seconds=statistics.median(ours for ours, _ in cpu),
        theirs_cpu_seconds=statistics.median(theirs for _, theirs in cpu),
        cpu_ratio=statistics.median(ours / theirs for ours, theirs in cpu),
    )


def bootstrap(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def overhead(repeats: int = 30) -> dict[str, float]:
    """Microseconds that a task costs beyond the stage's own work, without messages."""
    size = Size("overhead", 4, 32, 4, 64)
    model = build(size, 1)
    batch = size.micro_batch * size.micro_batches
    x, y = torch.randn(batch, size.width), torch.randn(batch, size.width)
    graph = capture(model, (x,), targets=y, loss_fn=functional.mse_loss)
    plan = chain_plan(graph, size, 1)
    pipe = Pipeline(model, plan, functional.mse_loss, None, graph=graph, transport="in_process")
    assert graph.program is not None
    forward, names = lift_state(graph.program.module)
    state = [graph.program.state[name] for name in names]

    def bare() -> None:
        for start in range(0, batch, size.micro_batch):
            part = slice(start, start + size.micro_batch)
            loss, _ = forward(size.micro_batch, x[part], y[part], *state)
            loss.backward()

    def ours() -> None:
        pipe.accumulate((x,), targets=y)

    best = {"bare": float("inf"), "ours": float("inf")}
    for _ in range(repeats):
        for name, function in (("bare", bare), ("ours", ours)):
            start = time.thread_time()  # one thread computes; others on the machine don't count
            function()
            best[name] = min(best[name], time.thread_time() - start)
    tasks = 2 * size.micro_batches
    return {
        "bare_microseconds_per_task": best["bare"] / tasks * 1e6,
        "ours_microseconds_per_task": best["ours"] / tasks * 1e6,
        "overhead_microseconds_per_task": (best["ours"] - best["bare"]) / tasks * 1e6,
    }


def checks(folder: Path | None, ranks: int = 64) -> Iterator[dict[str, Any]]:
    """What every start does before a process talks to another: action lists, and the check."""
    for model in runtime_promise.MODELS:
        ours, _ = runtime_promise.plans(model, ranks, folder)
        start = time.process_time()
        lists = build_actions(ours)
        built = time.process_time() - start
        start = time.process_time()
        validate(ours)
        checked = time.process_time() - start
        yield {
            "model": model,
            "ranks": ranks,
            "tasks": sum(len(line) for line in ours.schedule.tasks),
            "messages": len(lists.messages),
            "build_seconds": built,
            "check_seconds": checked,
        }


class Results:
    """What was measured, kept in a file between runs."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.parts: dict[str, Any] = {}
        if path is not None and path.exists():
            self.parts = json.loads(path.read_text())

    def put(self, part: str, keys: tuple[str, ...], rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds rows as they come; those with the same ``keys`` are replaced."""
        found = self.parts.setdefault(part, [])
        for row in rows:
            same = [old for old in found if all(old[key] == row[key] for key in keys)]
            for old in same:
                found.remove(old)
            found.append(dict(row))
            print(part, "  ".join(f"{key} {_short(value)}" for key, value in row.items()))
            sys.stdout.flush()
            if self._path is not None:
                self._path.write_text(json.dumps(self.parts, indent=1) + "\n")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Runs what the command line asks for and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="overhead,steps,checks,promise,sleep,memory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--sizes", default=",".join(size.name for size in SIZES))
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--models", default=",".join(runtime_promise.MODELS))
    parser.add_argument("--devices", default="8,16,32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plans", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(options.json)
    if options.plans:
        options.plans.mkdir(parents=True, exist_ok=True)
    parts = options.parts.split(",") if options.parts else []
    if "overhead" in parts:
        results.put("overhead", (), [overhead()])
    if "steps" in parts:
        rows = (
            asdict(compare(size, workers, options.pairs))
            for size in SIZES
            if size.name in options.sizes.split(",")
            for workers in (int(item) for item in options.workers.split(","))
        )
        results.put("steps", ("size", "workers"), rows)
    if "checks" in parts:
        results.put("checks", ("model", "ranks"), checks(options.plans))
    if "promise" in parts:
        cells = (
            runtime_promise.promise(model, int(devices), options.repeats, options.plans)
            for model in options.models.split(",")
            for devices in options.devices.split(",")
        )
        shown = (
            asdict(row) | {"promised": row.promised, "measured": row.measured, "error": row.error}
            for row in cells
        )
        results.put("promise", ("model", "devices"), shown)
    if "sleep" in parts:
        shown = (
            asdict(row) | {"error": row.error}
            for row in runtime_promise.sleep_checks(options.plans)
        )
        results.put("sleep", ("model",), shown)
    if "memory" in parts:
        shown = (asdict(row) | {"error": row.error} for row in runtime_memory.memory())
        results.put("memory", ("model", "shape", "rank"), shown)
    if options.markdown:
        options.markdown.write_text(runtime_page.page(results.parts))


if __name__ == "__main__":
    main()
