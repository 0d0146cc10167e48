"""How long it takes to measure a model: GPT-2 with 124M parameters at four micro-batch sizes.

``python benchmarks/profile_speed.py [--micro-batches 1,2,4,8] [--runs N] [--json FILE]
[--markdown FILE]``

One process on one core and one thread captures the model on the meta device (not timed as
profiling) and profiles it, with the progress bar of the command line. Wall-clock seconds and
CPU seconds of every run are printed; the target is 20 s of wall-clock time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
from pathlib import Path

import torch

from graphpipe.cli.output import Output
from graphpipe.cost.hardware import hardware
from graphpipe.cost.profiler import profile
from graphpipe.programs.planning import capture_job
from graphpipe.zoo.gpt2 import gpt2

TARGET_SECONDS = 20.0
PAGE = """# How long a profile takes

Measured on {date} with `python benchmarks/profile_speed.py --runs {runs}`: one process on one core
of a {machine}.

GPT-2 with {parameters:.0f}M parameters and a context of 1024 tokens, forward and backward of every
distinct operator at micro-batches of {sizes} samples, slices for the correction and the optimizer
step. The target is {target:.0f} s of wall-clock time. The capture before it took {captured:.1f} s.

| wall-clock time, s | CPU time, s |
|---|---|
{rows}
"""


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batches", default="1,2,4,8", help="sizes, samples, with commas")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--markdown", type=Path, help="write the page for the docs here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sizes = [int(item) for item in options.micro_batches.split(",")]
    start = time.perf_counter()
    graph = capture_job(gpt2())
    captured = time.perf_counter() - start
    count = sum(p.numel for p in graph.parameters if p.trainable)
    print(f"GPT-2, {count / 1e6:.0f}M parameters, {len(graph.ops)} operators, sizes {sizes}")
    print(f"{hardware(torch.device('cpu')).description}, torch {torch.__version__}")
    print(f"captured in {captured:.1f} s")
    output, runs = Output(), []
    for number in range(options.runs):
        start, cpu = time.perf_counter(), time.process_time()
        with output.progress("measuring") as bar:
            costs = profile(graph, "cpu", micro_batches=sizes, progress=bar)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        runs.append({"wall_seconds": wall, "cpu_seconds": cpu})
        print(f"run {number + 1}: {wall:.1f} s of wall-clock time, {cpu:.1f} s of CPU time")
    for note in costs.notes:
        print(f"note: {note}")
    best = min(item["wall_seconds"] for item in runs)
    print(f"fastest {best:.1f} s, target {TARGET_SECONDS:.0f} s: {best <= TARGET_SECONDS}")
    if options.markdown is not None:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        rows = [f"| {item['wall_seconds']:.1f} | {item['cpu_seconds']:.1f} |" for item in runs]
        page = PAGE.format(
            date=today,
            runs=options.runs,
            machine=f"{os.cpu_count()}-core {platform.machine()} CPU, torch {torch.__version__}",
            parameters=count / 1e6,
            sizes=", ".join(map(str, sizes)),
            captured=captured,
            target=TARGET_SECONDS,
            rows="\n".join(rows),
        )
        options.markdown.write_text(page, encoding="utf-8")
    if options.json is not None:
        data = {"captured_seconds": captured, "runs": runs, "target_seconds": TARGET_SECONDS}
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
