"""Whether long runs stay as they began: memory, file descriptors, threads, time of a step.

``python benchmarks/endurance.py [--json FILE] [--steps 10000] [--iterations 500]
[--parts train,emulate]``

- *train*: a small model with branches, on 4 workers over gloo, for 10,000 optimizer steps, with a
  checkpoint in the background every 1,000 (the last 2 stay). Every worker notes its resident
  memory, open file descriptors, threads and CPU time per step, 50 times over the run. The first
  fifth is warm-up. Printed for each worker: the slope of each over the rest, as growth over the
  whole rest of the run in units of what it was. CPU time is what counts for the time of a step,
  because other work on the machine does not change it much; the wall-clock median is printed too.
- *emulate*: 32 ranks as processes for 500 iterations on the virtual clock, which must equal the
  simulator in the last iteration as in the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn

from graphpipe.cost.analytic import estimate
from graphpipe.cost.cluster import Cluster
from graphpipe.graph.capture import capture
from graphpipe.plan.plan import Plan
from graphpipe.planner.search import plan as search
from graphpipe.runtime.emulate import emulate
from graphpipe.runtime.launch import launch
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.simulate.simulator import simulate

SAMPLES = 50
WARM_UP = 0.2


class Branches(nn.Module):
    """Four branches of three layers each, joined."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU(),
            )
            for _ in range(4)
        )  # fmt: skip
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([branch(x) for branch in self.branches], 1))


@dataclass(frozen=True)
class Sample:
    """What one worker saw at a step.

    ``memory_bytes`` resident; ``cpu_seconds`` and ``wall_seconds`` per step since the last sample.
    """

    step: int
    memory_bytes: int
    descriptors: int
    threads: int
    cpu_seconds: float
    wall_seconds: float


def train_worker(steps: int, folder: str) -> list[Sample]:
    """The life of one worker."""
    torch.manual_seed(0)
    model = Branches()
    x, targets = torch.randn(32, 32), torch.randint(0, 10, (32,))
    loss_fn = nn.functional.cross_entropy
    graph = capture(model, (x,), targets=targets, loss_fn=loss_fn)
    cluster = Cluster.uniform("cpu-core", nodes=1, per_node=dist.get_world_size())
    plan = search(graph, estimate(graph, cluster), cluster, batch_size=32)
    pipe = Pipeline(
        model, plan, loss_fn, lambda named: torch.optim.AdamW(named, 1e-3), graph=graph, timeout=600
    )
    process = psutil.Process()
    samples: list[Sample] = []
    every = max(1, steps // SAMPLES)
    cpu, wall = time.process_time(), time.monotonic()
    for step in range(1, steps + 1):
        draw = torch.Generator().manual_seed(step)
        batch = torch.randn(32, 32, generator=draw)
        pipe.step((batch,), targets=targets)
        if step % max(1, steps // 10) == 0:
            pipe.save(folder, data=step, keep=2, background=True)
        if step % every == 0:
            samples.append(
                Sample(
                    step,
                    process.memory_info().rss,
                    process.num_fds(),
                    process.num_threads(),
                    (time.process_time() - cpu) / every,
                    (time.monotonic() - wall) / every,
                )
            )
            cpu, wall = time.process_time(), time.monotonic()
    pipe.close()
    return samples


def growth(samples: list[Sample], field: str) -> float:
    """Theil-Sen slope over the run after the warm-up, times its length, over the median."""
    kept = samples[int(len(samples) * WARM_UP) :]
    points = [(s.step, float(getattr(s, field))) for s in kept]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :]]
    middle = statistics.median(value for _, value in points)
    return statistics.median(slopes) * (points[-1][0] - points[0][0]) / middle


def run_training(steps: int, folder: str) -> dict[str, object]:
    """Trains, and prints a row for each worker."""
    start = time.monotonic()
    results: list[list[Sample]] = launch(train_worker, 4, (steps, folder), timeout=600, threads=1)
    seconds = time.monotonic() - start
    print(f"{steps} optimizer steps on 4 workers in {seconds:.0f} s; growth after warm-up:")
    print("worker   memory  descriptors  threads  CPU/step  wall/step   (median CPU, wall a step)")
    for rank, samples in enumerate(results):
        fields = ("memory_bytes", "descriptors", "threads", "cpu_seconds", "wall_seconds")
        memory, files, threads, cpu, wall = (growth(samples, field) for field in fields)
        kept = samples[int(len(samples) * WARM_UP) :]
        print(
            f"{rank:6}  {memory:+7.2%}  {files:+11.2%}  {threads:+7.2%}  {cpu:+8.1%}  {wall:+9.1%}"
            f"   ({statistics.median(s.cpu_seconds for s in kept) * 1e3:.2f} ms, "
            f"{statistics.median(s.wall_seconds for s in kept) * 1e3:.2f} ms; "
            f"{kept[0].memory_bytes >> 20} -> {kept[-1].memory_bytes >> 20} MiB, "
            f"{kept[0].descriptors} -> {kept[-1].descriptors} files, "
            f"{kept[0].threads} -> {kept[-1].threads} threads)"
        )
    return {"seconds": seconds, "workers": [[asdict(s) for s in worker] for worker in results]}


def emulated_plan() -> Plan:
    """A plan of 32 ranks for a model with branches."""
    model = Branches(256)
    x, targets = torch.randn(8, 256), torch.randint(0, 10, (8,))
    graph = capture(model, (x,), targets=targets, loss_fn=nn.functional.cross_entropy)
    cluster = Cluster.uniform("v100-16gb", nodes=4, per_node=8)
    return search(graph, estimate(graph, cluster), cluster, batch_size=8192)


def run_emulation(iterations: int) -> dict[str, object]:
    """32 ranks on the virtual clock; the last iteration against the simulator."""
    plan = emulated_plan()
    ours = psutil.Process()
    before = (ours.num_fds(), ours.num_threads())
    start = time.monotonic()
    timeline = emulate(plan, clock="virtual", iterations=iterations, timeout=600)
    seconds = time.monotonic() - start
    expected = simulate(plan).iteration_ns
    after = (ours.num_fds(), ours.num_threads())
    print(
        f"{iterations} iterations of {plan.world_size} emulated ranks in {seconds:.0f} s; the last "
        f"one takes {timeline.iteration_ns} ns on the virtual clock, {expected} ns by the "
        f"simulator; launcher: descriptors {before[0]} -> {after[0]}, threads {before[1]} -> "
        f"{after[1]}"
    )
    return {
        "seconds": seconds,
        "emulated_ns": timeline.iteration_ns,
        "simulated_ns": expected,
        "descriptors": [before[0], after[0]],
        "threads": [before[1], after[1]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--parts", default="train,emulate")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report: dict[str, object] = {"date": str(date.today()), "cores": os.cpu_count()}
    if "train" in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            report["train"] = run_training(options.steps, folder)
    if "emulate" in options.parts:
        report["emulate"] = run_emulation(options.iterations)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
