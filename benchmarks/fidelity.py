"""How well the predictions hold: time of a stage, time of an iteration, activation bytes.

``python benchmarks/fidelity.py [--models a,b] [--workers 1,2] [--repeats N] [--passes N]
[--quick] [--json FILE] [--merge] [--markdown FILE]``

Each model is captured, profiled on one core, and planned for one and for two workers (for two,
profiled while the other core does the same); the link between two workers is probed. Then the
plans run, each worker pinned to a core:

- *stage*: forward plus backward of one micro-batch of each stage, as the plan predicts it,
  against the mean over the micro-batches of a step but the first (which adds up no gradients), in
  the fastest step of the run. A stage that is one of the slices that served for the profiler's
  correction does not count.
- *iteration*: the plan's predicted iteration against the fastest step.
- *activations*: the peak of what autograd keeps, counted by hooks (each memory once, parameters
  apart), against what the cost table says for the plan's order of tasks.

All runs are repeated in ``--passes`` rounds over all models, so that a slow minute does not
hit one model only. The *floor* beside an error is how far the best of the first round lies
from the best of the others: two measurements of the same thing. Where there is a GPU, the
one-worker runs are repeated on it.

``--merge`` keeps the rows of the models that are not run now, so that the models can be measured
in several calls.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from graphpipe.cost.cluster import Cluster
from graphpipe.cost.probe import Probe, probe
from graphpipe.cost.profiler import profile
from graphpipe.cost.profiler.slices import slices_of
from graphpipe.cost.table import CostTable
from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.planner.search import plan as search
from graphpipe.runtime.launch import launch
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.simulate.timeline import Timeline
from graphpipe.zoo.candle_uno import candle_uno
from graphpipe.zoo.clip import clip
from graphpipe.zoo.dlrm import dlrm
from graphpipe.zoo.gpt2 import gpt2
from graphpipe.zoo.job import Batch, Job
from graphpipe.zoo.mmt import mmt
from graphpipe.zoo.t5 import t5

TARGETS = {"stage": 0.08, "iteration": 0.10, "activations": 0.05}
"""Largest median error; for times the larger of this and twice the floor."""
LEARNING_RATE = 1e-4
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
"""Cores of this process before it pins itself; workers inherit the affinity, not this."""


@dataclass(frozen=True)
class Model:
    """A model, its mini-batch, and the micro-batch sizes that are profiled and planned with."""

    name: str
    job: Callable[[], Job]
    batch_size: int
    micro_batches: tuple[int, ...]


MODELS = (
    Model(
        "gpt2",
        lambda: gpt2(vocabulary=4000, length=128, width=384, heads=6, layers=6),
        8,
        (1, 2, 4, 8),
    ),
    Model(
        "t5",
        lambda: t5(
            vocabulary=4000, source_length=96, target_length=96, width=320, heads=5, layers=4
        ),
        8,
        (1, 2, 4, 8),
    ),
    Model(
        "clip",
        lambda: clip(image=(96, 16, 320, 5, 6), text=(4000, 32, 256, 4, 6), shared=256),
        16,
        (2, 4, 8, 16),
    ),
    Model(
        "dlrm",
        lambda: dlrm(
            tables=8, rows=20_000, features=32, bag=20, dense=512, width=768,
            bottom_layers=3, top_layers=3,
        ),
        256,
        (32, 64, 128, 256),
    ),
    Model("candle-uno", lambda: candle_uno(width=768), 256, (32, 64, 128, 256)),
    Model(
        "mmt",
        lambda: mmt(depths=(3, 3, 3), width=256, heads=4, sequence=64, classes=100),
        16,
        (2, 4, 8, 16),
    ),
)  # fmt: skip
QUICK = (
    Model(
        "gpt2",
        lambda: gpt2(vocabulary=101, length=16, width=32, heads=2, layers=3),
        8,
        (2, 4, 8),
    ),
    Model(
        "mmt",
        lambda: mmt(depths=(2, 1), width=32, heads=2, sequence=8, classes=5),
        8,
        (2, 4, 8),
    ),
)


@dataclass
class Row:
    """One comparison.

    Attributes:
        model: Name of the model.
        workers: Number of workers, or the kind of GPU.
        what: ``stage``, ``iteration`` or ``activations``.
        name: Which stage or rank.
        predicted: Seconds or bytes.
        measured: Seconds or bytes, the smallest of all repeats.
        floor: Relative difference of two measurements of the same thing.
    """

    model: str
    workers: str
    what: str
    name: str
    predicted: float
    measured: float
    floor: float = 0.0

    @property
    def error(self) -> float:
        """|predicted - measured| / measured."""
        return abs(self.predicted - self.measured) / self.measured


@dataclass
class Prepared:
    """A model ready to run: graph; costs and plans by number of workers."""

    model: Model
    graph: ModelGraph
    costs: dict[int, CostTable]
    batch: Batch
    plans: dict[int, Plan] = field(default_factory=dict)


@dataclass
class Run:
    """What one launch measured: seconds of each step, of a task of each stage and kind (the
    mean over a step's micro-batches, in the fastest step), and the peak activation bytes of each
    rank."""

    steps: list[float]
    tasks: dict[tuple[int, str], float]
    peaks: tuple[int, ...]


class Kept:
    """Counts what autograd keeps, each piece of memory once, and its peak."""

    def __init__(self, apart: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> None:
        self._apart = {_storage(tensor) for tensor in apart}
        self._inputs = {_storage(tensor) for tensor in inputs}
        self._holders: dict[object, int] = {}
        self.now = 0
        self.peak = 0

    def pack(self, tensor: torch.Tensor) -> object:
        """Hook: a tensor is kept."""
        storage = _storage(tensor)
        if storage in self._apart:
            return tensor
        key: object = storage
        nbytes = tensor.untyped_storage().nbytes()
        if storage in self._inputs:
            # A slice of the mini-batch's inputs, which are there anyway: only its own rows.
            key, nbytes = (storage, tensor.storage_offset()), tensor.nbytes
        return _Holder(self, key, nbytes, tensor)

    @staticmethod
    def unpack(held: object) -> torch.Tensor:
        """Hook: the tensor is wanted back."""
        return held.tensor if isinstance(held, _Holder) else held  # type: ignore[return-value]

    def enter(self, key: object, nbytes: int) -> None:
        """One more holder of this memory."""
        self._holders[key] = self._holders.get(key, 0) + 1
        if self._holders[key] == 1:
            self.now += nbytes
            self.peak = max(self.peak, self.now)

    def leave(self, key: object, nbytes: int) -> None:
        """One holder less."""
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.now -= nbytes


class _Holder:
    """Stands for a kept tensor; autograd drops it after the backward."""

    __slots__ = ("count", "key", "nbytes", "tensor")

    def __init__(self, count: Kept, key: object, nbytes: int, tensor: torch.Tensor) -> None:
        self.count, self.key, self.nbytes, self.tensor = count, key, nbytes, tensor
        count.enter(key, nbytes)

    def __del__(self) -> None:
        self.count.leave(self.key, self.nbytes)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def pin(core: int) -> None:
    """Keeps this process on one core and one thread."""
    torch.set_num_threads(1)
    if CORES:
        os.sched_setaffinity(0, {CORES[core % len(CORES)]})


def prepare(model: Model, workers: Sequence[int], network: Cluster, device: str) -> Prepared:
    """Captures, profiles and plans."""
    torch.manual_seed(0)
    job = model.job()
    assert job.data is not None
    module = job.build_model()
    graph = capture(
        module, job.args, job.kwargs, targets=job.targets, loss_fn=job.loss_fn,
        **job.capture_options,
    )  # fmt: skip
    batch = next(iter(job.data(model.batch_size, 0)))
    found = Prepared(model, graph, {}, batch)
    for count in workers:
        # With the other cores as busy as they will be.
        costs = found.costs[count] = profile(
            graph, device, micro_batches=model.micro_batches, optimizer="adamw",
            neighbours=count - 1,
        )  # fmt: skip
        kind = next(iter(costs.devices))
        devices = (
            tuple(item.model_copy(update={"kind": kind}) for item in network.devices[:1]) * count
        )
        cluster = Cluster(name=f"{count} workers", devices=devices, network=network.network)
        found.plans[count] = search(
            graph,
            costs,
            cluster,
            batch_size=model.batch_size,
            micro_batches=model.micro_batches,
            recompute=False,
        )
    return found


def run(ready: Prepared, count: int, repeats: int, device: str = "cpu") -> Run:
    """Runs a plan on its workers and measures."""
    if device != "cpu":
        return _steps(ready, count, repeats, device, "in_process")

    def work() -> Run:
        pin(dist.get_rank())
        return _steps(ready, count, repeats, device, "process_group")

    found: list[Run] = launch(work, count, threads=1, method="fork")
    peaks = tuple(peak for item in found for peak in item.peaks)
    return Run(found[0].steps, found[0].tasks, peaks)


def _steps(ready: Prepared, count: int, repeats: int, device: str, transport: Any) -> Run:
    job = ready.model.job()
    pipe = Pipeline(
        job.build_model(),
        ready.plans[count],
        job.loss_fn,
        lambda named: torch.optim.AdamW(named, LEARNING_RATE),
        graph=ready.graph,
        transport=transport,
        device=device,
    )
    batch = ready.batch
    place = torch.device(device)
    args, kwargs, targets = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(place), (batch.args, dict(batch.kwargs), batch.targets)
    )
    steps: list[float] = []
    tasks: dict[tuple[int, str], float] = {}
    for _ in range(2):
        pipe.step(args, kwargs, targets=targets)
    for _ in range(repeats):
        if transport == "process_group":
            dist.barrier()
        start = time.perf_counter()
        pipe.step(args, kwargs, targets=targets)
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        steps.append(time.perf_counter() - start)
        _, timeline = pipe.trace_step(args, kwargs, targets=targets)
        for key, seconds in mean_tasks(timeline).items():
            tasks[key] = min(tasks.get(key, seconds), seconds)
    state = [tensor for worker in pipe.workers for tensor in worker.state.values()]
    leaves = torch.utils._pytree.tree_leaves((args, kwargs, targets))
    kept = Kept(state, (leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
        pipe.step(args, kwargs, targets=targets)
    pipe.close()
    return Run(steps, tasks, (kept.peak,))


def mean_tasks(timeline: Timeline) -> dict[tuple[int, str], float]:
    """Seconds of a task of each (stage, kind) of one step: the mean over its micro-batches.

    The first on each rank is left out where there are others: it adds no gradient to ``.grad``,
    which the cost of a task includes.
    """
    found: dict[tuple[int, str], dict[int, list[float]]] = {}
    for event in sorted(timeline.events, key=lambda item: item.start_ns):
        if event.kind in ("F", "B"):
            seconds = (event.end_ns - event.start_ns) / 1e9
            of_rank = found.setdefault((event.stage, event.kind), {})
            of_rank.setdefault(event.rank, []).append(seconds)
    return {
        key: statistics.fmean(
            seconds for times in ranks.values() for seconds in times[1 if len(times) > 1 else 0 :]
        )
        for key, ranks in found.items()
    }


def predicted_peaks(ready: Prepared, plan: Plan, costs: CostTable) -> list[float]:
    """Peak activation bytes of each rank: the cost table along the plan's order of tasks."""
    index = ready.graph.op_index
    found: list[float] = []
    for tasks in plan.schedule.tasks:
        now = peak = 0.0
        for task in tasks:
            stage = plan.stages[task.stage]
            rows = [index[name] for name in stage.ops]
            fixed, per_sample = costs.saved_bytes(rows, stage.micro_batch)
            size = fixed + per_sample * stage.micro_batch
            if stage.has_backward:
                now += size if task.kind == "F" else -size
            peak = max(peak, now)
        found.append(peak)
    return found


def compare(ready: Prepared, count: int, runs: Sequence[Run], label: str) -> list[Row]:
    """The rows of one plan from its runs, one of each pass."""
    plan, name = ready.plans[count], ready.model.name
    kind = next(iter(ready.costs[count].devices))
    used = {frozenset(part.ops) for part in slices_of(ready.graph)}
    rows: list[Row] = []
    for number, stage in enumerate(plan.stages):
        if frozenset(stage.ops) in used:
            continue
        directions = ("F", "B") if stage.has_backward else ("F",)
        times = [
            sum(item.tasks[number, direction] for direction in directions)
            for item in runs
            if all((number, direction) in item.tasks for direction in directions)
        ]
        if times:
            stated = stage.times[kind]
            predicted = (stated.forward_ns + stated.backward_ns) / 1e9
            rows.append(Row(name, label, "stage", stage.name, predicted, min(times), _floor(times)))
    best = [min(item.steps) for item in runs]
    assert plan.prediction is not None
    iteration = plan.prediction.iteration_ns / 1e9
    rows.append(Row(name, label, "iteration", "", iteration, min(best), _floor(best)))
    for rank, predicted in enumerate(predicted_peaks(ready, plan, ready.costs[count])):
        peaks = [item.peaks[rank] for item in runs]
        if max(peaks) > 0:
            rows.append(
                Row(name, label, "activations", f"rank {rank}", predicted, max(peaks),
                    (max(peaks) - min(peaks)) / max(peaks))
            )  # fmt: skip
    return rows


def _floor(values: Sequence[float]) -> float:
    """How far the first pass lies from the best of the others."""
    if len(values) < 2:
        return 0.0
    others = min(values[1:])
    return abs(values[0] - others) / min(values[0], others)


def probe_workers() -> Cluster:
    """Two workers on two cores, their link as measured."""

    def work() -> Probe:
        pin(dist.get_rank())
        return probe("cpu", name="here")

    found: list[Probe] = launch(work, 2, threads=1, method="fork")
    return found[0].cluster


def summary(rows: Sequence[Row]) -> list[tuple[str, float, float, float, bool]]:
    """(what, median error, median floor, bound, whether it holds) for each kind of row."""
    found: list[tuple[str, float, float, float, bool]] = []
    for what, target in TARGETS.items():
        chosen = [row for row in rows if row.what == what]
        if chosen:
            error = statistics.median(row.error for row in chosen)
            floor = statistics.median(row.floor for row in chosen)
            bound = target if what == "activations" else max(target, 2 * floor)
            found.append((what, error, floor, bound, error <= bound))
    return found


def as_markdown(rows: Sequence[Row], heading: Sequence[str]) -> str:
    """The page for the docs: the heading's lines, the medians, every row."""
    lines = [*heading, ""]
    lines += ["| what | median error | median floor | bound | holds |", "|---|---|---|---|---|"]
    for what, error, floor, bound, holds in summary(rows):
        lines.append(
            f"| {what} | {error:.1%} | {floor:.1%} | {bound:.1%} | {'yes' if holds else 'no'} |"
        )
    lines += ["", "| model | workers | what | predicted | measured | error | floor |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row.model} | {row.workers} | {row.what} {row.name} | {_shown(row, row.predicted)} "
            f"| {_shown(row, row.measured)} | {row.error:.1%} | {row.floor:.1%} |"
        )
    return "\n".join(lines) + "\n"


HEADING = """# Predicted and measured

How far what a plan says is from what happens: the time of a stage, the time of an iteration, and
the bytes that are kept between forward and backward. Every row has the *floor* beside its error:
how far two measurements of the same thing lie apart. Targets for the medians: 8 % for stages and
10 % for iterations, or twice the floor where that is more, and 5 % for activations.

Stages that served for the profiler's correction are not among the rows. `benchmarks/fidelity.py`
says how each number is measured.
"""


def _shown(row: Row, value: float) -> str:
    if row.what == "activations":
        return f"{value / 1e6:.2f} MB"
    return f"{value * 1e3:.2f} ms"


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="", help="names, with commas; default: all")
    parser.add_argument("--workers", default="1,2", help="numbers of workers, with commas")
    parser.add_argument("--repeats", type=int, default=10, help="steps of each run")
    parser.add_argument("--passes", type=int, default=3, help="rounds over all models")
    parser.add_argument("--quick", action="store_true", help="two small models")
    parser.add_argument("--json", type=Path, help="write all rows here")
    parser.add_argument("--merge", action="store_true", help="keep FILE's rows of other models")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    options = parser.parse_args()
    pin(0)
    chosen = [item for item in options.models.split(",") if item]
    models = [m for m in (QUICK if options.quick else MODELS) if not chosen or m.name in chosen]
    workers = [int(item) for item in options.workers.split(",")]
    cores = os.cpu_count() or 1
    machine = f"{cores}-core {platform.machine()} CPU, torch {torch.__version__}"
    network = probe_workers()
    ready = []
    for model in models:
        print(f"capturing, profiling and planning {model.name}", flush=True)
        ready.append(prepare(model, workers, network, "cpu"))
        for count in workers:
            for note in ready[-1].costs[count].notes:
                print(f"  {count} workers: {note}", flush=True)
    runs: dict[tuple[str, int], list[Run]] = {}
    for number in range(options.passes):
        for item in ready:
            for count in workers:
                print(f"pass {number + 1}: {item.model.name} on {count}", flush=True)
                found = run(item, count, options.repeats)
                runs.setdefault((item.model.name, count), []).append(found)
    rows = [
        row
        for item in ready
        for count in workers
        for row in compare(item, count, runs[item.model.name, count], str(count))
    ]
    if torch.cuda.is_available():
        place = torch.cuda.get_device_name(0)
        machine += f"; {place}"
        for model in models:
            item = prepare(model, [1], network, "cuda:0")
            again = [run(item, 1, options.repeats, "cuda:0") for _ in range(options.passes)]
            rows += compare(item, 1, again, place)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    if options.merge and options.json is not None and options.json.exists():
        rows = merged(json.loads(options.json.read_text(encoding="utf-8"))["rows"], rows)
    command = f"python benchmarks/fidelity.py --repeats {options.repeats} --passes {options.passes}"
    if options.merge:
        command += " --models A,B --merge"
    heading = [*HEADING.splitlines(), "", f"Measured on {today} with `{command}`: {machine}."]
    page = as_markdown(rows, heading)
    print(page)
    if options.markdown is not None:
        options.markdown.write_text(page, encoding="utf-8")
    if options.json is not None:
        data = {
            "date": today,
            "machine": machine,
            "rows": [{**asdict(row), "error": row.error} for row in rows],
            "summary": [
                dict(zip(("what", "error", "floor", "bound", "holds"), item, strict=True))
                for item in summary(rows)
            ],
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def merged(before: Sequence[dict[str, Any]], rows: Sequence[Row]) -> list[Row]:
    """Rows of other models as they were, and the new ones, in the order of :data:`MODELS`."""
    again = {row.model for row in rows}
    kept = [
        Row(**{key: value for key, value in item.items() if key != "error"})
        for item in before
        if item["model"] not in again
    ]
    order = {model.name: i for i, model in enumerate(MODELS)}
    return sorted([*kept, *rows], key=lambda row: order.get(row.model, len(order)))


if __name__ == "__main__":
    main()
