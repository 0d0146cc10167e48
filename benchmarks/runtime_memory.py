"""Whether the ranks of a plan hold as many bytes as it says, at their peaks.

Plans with several shapes run on workers here. PyTorch's profiler reports every allocation and
release of tensor memory in one step; added up from what is held before the step (parameters,
buffers, optimizer state), they give the peak of each rank. It is compared with the simulated
peak. The optimizer is the fused AdamW, whose step takes no memory of its own. A part of
``benchmarks/runtime.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphpipe.cost.analytic import estimate
from graphpipe.cost.boxes import named_cluster
from graphpipe.cost.cluster import Cluster
from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.planner.search import plan as search
from graphpipe.runtime.launch import launch
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.simulate.simulator import simulate
from graphpipe.zoo.candle_uno import candle_uno
from graphpipe.zoo.clip import clip
from graphpipe.zoo.dlrm import dlrm
from graphpipe.zoo.gpt2 import gpt2
from graphpipe.zoo.job import Batch, Job
from graphpipe.zoo.mmt import mmt
from graphpipe.zoo.t5 import t5

JOBS: dict[str, tuple[Callable[[], Job], int]] = {
    "gpt2": (lambda: gpt2(vocabulary=1000, length=64, width=128, heads=4, layers=4), 64),
    "t5": (
        lambda: t5(
            vocabulary=1000, source_length=48, target_length=48, width=128, heads=4, layers=2
        ),
        64,
    ),
    "clip": (
        lambda: clip(image=(48, 16, 128, 4, 3), text=(1000, 24, 128, 4, 3), shared=64), 64
    ),
    "dlrm": (
        lambda: dlrm(
            tables=6, rows=5000, features=32, bag=10, dense=256, width=384,
            bottom_layers=3, top_layers=3,
        ),
        512,
    ),
    "candle-uno": (lambda: candle_uno(width=384, tower_layers=4), 512),
    "mmt": (lambda: mmt(depths=(2, 2, 2), width=128, heads=4, sequence=32, classes=50), 64),
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "default": {},
    "no replicas": {"replicas": False, "copies": 1},
    "recomputed": {"replicas": False, "copies": 1, "recompute": True},
    "chain": {"replicas": False, "copies": 1, "families": ("chain", "sequential")},
}
"""Options of the search by kind of plan."""
PARTS = 16
"""Micro-batches of a mini-batch. A rank has its gradients from its first backward on, and the
prediction counts them always: with few micro-batches it is an upper limit."""


@dataclass(frozen=True)
class MemoryRow:
    """One rank of one plan; bytes."""

    model: str
    shape: str
    rank: int
    stages: int
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1.0


def measured_peak(pipe: Pipeline, step: Callable[[], object]) -> int:
    """The most bytes of tensor memory that this process's rank holds during a step."""
    (worker,) = pipe.workers
    step()
    step()  # optimizer state exists now
    worker.zero_gradients()
    held: list[Any] = [*worker.state.values()]
    if worker.optimizer is not None:
        held += pytree.tree_leaves(list(worker.optimizer.state.values()))
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in held
        if isinstance(tensor, torch.Tensor)
    }
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        step()
    assert profiler.profiler is not None
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    level = most = 0
    for _, change in changes:
        level += change
        most = max(most, level)
    return sum(storages.values()) + most


def _measure(job: Job, batch: Batch, graph: ModelGraph, plan: Plan) -> int:
    pipe = Pipeline(
        job.build_model(), plan, job.loss_fn,
        lambda named: torch.optim.AdamW(named, 1e-4, fused=True), graph=graph,
    )  # fmt: skip
    peak = measured_peak(pipe, lambda: pipe.step(batch.args, batch.kwargs, targets=batch.targets))
    pipe.close()
    return peak


def memory(workers: int = 3) -> Iterator[MemoryRow]:
    """Every rank of every plan."""
    base = named_cluster(f"1x{workers}xv100-16gb")
    cluster = Cluster(devices=base.devices)
    for model, (make, batch_size) in JOBS.items():
        job = make()
        assert job.data is not None
        batch = next(iter(job.data(batch_size, 0)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = capture(
                job.build_model(), job.args, job.kwargs, targets=job.targets,
                loss_fn=job.loss_fn, **job.capture_options,
            )  # fmt: skip
        costs = estimate(graph, cluster)
        for shape, options in SHAPES.items():
            found = search(
                graph, costs, cluster, batch_size=batch_size,
                micro_batches=(batch_size // PARTS,), **options,
            )  # fmt: skip
            predicted = simulate(found, network="channel").peak_memory
            peaks = launch(
                _measure, workers, (job, batch, graph, found), timeout=120, threads=1, method="fork"
            )
            for rank, (want, got) in enumerate(zip(predicted, peaks, strict=True)):
                if found.stages_of_device[rank]:
                    yield MemoryRow(model, shape, rank, len(found.stages), want, got)
