"""Whether an emulated iteration takes the wall-clock time that was simulated.

Every rank is a process, the messages are real, and computing is replaced by sleeping for the
planned time, stretched. Two parts of ``benchmarks/runtime.py``:

- *promise*: for the three models that the method was published with, on 8, 16 and 32 devices,
  the default plan against the best sequential plan (a chain of stages, with all our
  freedoms). The measured speed-up is compared with the simulated one. Each plan is stretched
  so that the sequential iteration takes ``SECONDS``.
- *sleep*: plans of 16 ranks, stretched so that the shortest task takes 20 ms.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from graphpipe.cost.analytic import estimate
from graphpipe.cost.boxes import named_cluster
from graphpipe.graph.capture import capture
from graphpipe.plan.plan import Plan
from graphpipe.planner.search import plan as search
from graphpipe.runtime.emulate import SHORTEST_TASK_NS, emulate
from graphpipe.simulate.simulator import simulate
from graphpipe.zoo.load import load_job

MODELS = {"mmt": 16, "dlrm": 256, "candle-uno": 1024}
"""Samples of a mini-batch per device, by model."""
DEVICE = "v100-16gb"
PER_NODE = 8
SECONDS = 10.0
"""What the sequential iteration is stretched to."""
LONGEST_SECONDS = 90.0
"""A plan whose iteration would be stretched beyond this is left out of the sleep check."""


@dataclass(frozen=True)
class PromiseRow:
    """A model on a number of devices; iterations in milliseconds, unstretched."""

    model: str
    devices: int
    batch_size: int
    stretch: float
    graph_simulated_ms: float
    graph_measured_ms: float
    sequential_simulated_ms: float
    sequential_measured_ms: float

    @property
    def promised(self) -> float:
        """Simulated speed-up."""
        return self.sequential_simulated_ms / self.graph_simulated_ms

    @property
    def measured(self) -> float:
        """Measured speed-up."""
        return self.sequential_measured_ms / self.graph_measured_ms

    @property
    def error(self) -> float:
        """Relative difference of the two."""
        return self.measured / self.promised - 1.0


@dataclass(frozen=True)
class SleepRow:
    """A plan of 16 ranks, stretched until its shortest task takes 20 ms."""

    model: str
    tasks: int
    stretch: float
    simulated_seconds: float
    measured_seconds: float

    @property
    def error(self) -> float:
        """Relative difference."""
        return self.measured_seconds / self.simulated_seconds - 1.0


def plans(model: str, devices: int, folder: Path | None = None) -> tuple[Plan, Plan]:
    """The default plan and the best sequential one; kept in ``folder``, if there is one, so that
    nothing is searched while time is measured."""
    kinds = ("graph", "sequential")
    files = [folder / f"{model}-{devices}-{kind}.json" for kind in kinds] if folder else []
    if files and all(file.exists() for file in files):
        ours, sequential = (Plan.load(file) for file in files)
        return ours, sequential
    job = load_job(f"zoo:{model}").on_meta()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = capture(
            job.build_model(), job.args, job.kwargs, targets=job.targets, loss_fn=job.loss_fn,
            **job.capture_options,
        )  # fmt: skip
    cluster = named_cluster(f"{max(1, devices // PER_NODE)}x{min(PER_NODE, devices)}x{DEVICE}")
    costs = estimate(graph, cluster)
    batch_size = MODELS[model] * devices
    ours = search(graph, costs, cluster, batch_size=batch_size)
    sequential = search(
        graph, costs, cluster, batch_size=batch_size, families=("chain", "sequential")
    )
    for file, found in zip(files, (ours, sequential), strict=False):
        found.save(file)
    return ours, sequential


def promise(model: str, devices: int, repeats: int, folder: Path | None = None) -> PromiseRow:
    """Both plans simulated, and emulated by sleeping (the median of ``repeats``)."""
    ours, sequential = plans(model, devices, folder)
    simulated = {
        plan: simulate(found, network="channel").iteration_ns
        for plan, found in (("graph", ours), ("sequential", sequential))
    }
    stretch = SECONDS * 1e9 / simulated["sequential"]
    measured: dict[str, list[float]] = {"graph": [], "sequential": []}
    for _ in range(repeats):
        for name, found in (("graph", ours), ("sequential", sequential)):
            timeline = emulate(found, clock="sleep", stretch=stretch)
            measured[name].append(timeline.iteration_ns / 1e6)
    return PromiseRow(
        model=model,
        devices=devices,
        batch_size=ours.batch_size,
        stretch=stretch,
        graph_simulated_ms=simulated["graph"] / 1e6,
        graph_measured_ms=statistics.median(measured["graph"]),
        sequential_simulated_ms=simulated["sequential"] / 1e6,
        sequential_measured_ms=statistics.median(measured["sequential"]),
    )


def sleep_checks(folder: Path | None = None, devices: int = 16) -> Iterator[SleepRow]:
    """The default plan of each model on 16 devices."""
    for model in MODELS:
        found, _ = plans(model, devices, folder)
        simulated = simulate(found, network="channel")
        tasks = [e.end_ns - e.start_ns for e in simulated.events if e.kind in ("F", "B")]
        stretch = SHORTEST_TASK_NS / min(ns for ns in tasks if ns)
        seconds = simulated.iteration_ns / 1e9 * stretch
        if seconds > LONGEST_SECONDS:
            print(f"{model}: {seconds:.0f} s an iteration, left out")
            continue
        timeline = emulate(found, clock="sleep")
        yield SleepRow(
            model, len(tasks), stretch, seconds, timeline.iteration_ns / 1e9 * stretch
        )  # fmt: skip
