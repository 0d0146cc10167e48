"""Plans a job, trains it on worker processes and in one process, and compares."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphpipe.cost.analytic import estimate
from graphpipe.cost.cluster import Cluster
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.planner.search import plan as search
from graphpipe.programs.planning import capture_job
from graphpipe.runtime.launch import launch
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.zoo.job import Batch, Job
from graphpipe.zoo.registry import ZOO

BATCH = 8
STEPS = 3
RATE = 0.01


@dataclass(frozen=True, eq=False)
class Subject:
    """A job with its model, built without dropout, and its graph."""

    job: Job
    model: nn.Module
    graph: ModelGraph


@lru_cache(maxsize=1)  # tests of one model come together
def subject(name: str) -> Subject:
    """``zoo:NAME`` or the name of a small model of the library."""
    if name.startswith("zoo:"):
        job = ZOO[name.removeprefix("zoo:")].make()
    else:
        pytest.importorskip("transformers")
        from benchmarks.library import LIBRARY

        job = LIBRARY[name](small=True)
    torch.manual_seed(0)
    model = without_dropout(job.build_model()).train()
    return Subject(job, model, capture_job(job, model))


def without_dropout(model: nn.Module) -> nn.Module:
    """One process draws its masks for the whole mini-batch: they are others, so none at all."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "activation_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def planned(graph: ModelGraph, devices: int, **options: Any) -> Plan:
    """The planner's own choice for so many cores."""
    cluster = Cluster.uniform("cpu-core", nodes=1, per_node=devices)
    costs = estimate(graph, cluster, optimizer="sgd")
    return search(graph, costs, cluster, **{"batch_size": BATCH, **options})


def batches(job: Job) -> list[Batch]:
    assert job.data is not None
    return list(itertools.islice(job.data(BATCH, 0), STEPS))


@dataclass(frozen=True)
class Run:
    """Losses by step and the state after the last one."""

    losses: list[float]
    state: dict[str, torch.Tensor]


def alone(of: Subject, micro_batch: int) -> Run:
    """Plain training in this process, accumulating over micro-batches of this many samples."""
    model = copy.deepcopy(of.model)
    chosen = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)
    losses = []
    for batch in batches(of.job):
        chosen.zero_grad()
        total = 0.0
        for start in range(0, BATCH, micro_batch):
            part = _part(batch, start, start + micro_batch)
            output = model(*part.args, **part.kwargs)
            if of.job.loss_fn is None:
                loss = output["loss"]
            else:
                loss = of.job.loss_fn(output, part.targets)
            loss = loss * (micro_batch / BATCH)
            loss.backward()
            total += float(loss.detach())
        chosen.step()
        losses.append(total)
    return Run(losses, {name: value.clone() for name, value in model.state_dict().items()})


def _part(batch: Batch, start: int, stop: int) -> Batch:
    def cut(leaf: Any) -> Any:
        return leaf[start:stop] if isinstance(leaf, torch.Tensor) else leaf

    return Batch(*pytree.tree_map(cut, (batch.args, dict(batch.kwargs), batch.targets)))


def on_workers(of: Subject, plan: Plan) -> Run:
    """Training by the plan, one process a rank, over gloo."""
    return launch(_work, plan.world_size, (of, plan), method="fork", threads=1)[0]


def _work(of: Subject, plan: Plan) -> Run:
    pipe = Pipeline(
        of.model,
        plan,
        of.job.loss_fn,
        lambda named: torch.optim.SGD(named, RATE),
        graph=of.graph,
    )
    losses = [
        float(pipe.step(batch.args, batch.kwargs, targets=batch.targets))
        for batch in batches(of.job)
    ]
    run = Run(losses, pipe.state_dict(to=0))
    pipe.close()
    return run


def assert_same(got: Run, want: Run, start: dict[str, torch.Tensor]) -> None:
    """Losses, and every parameter and buffer relative to how far training moved them."""
    assert got.losses == pytest.approx(want.losses, rel=1e-5, abs=1e-6)
    names = set(got.state)
    assert names == set(want.state)
    moved = {name: float((want.state[name] - start[name]).abs().max()) for name in names}
    farthest = max(moved.values())
    assert farthest > 1e-5, "nothing was trained"
    for name in names:
        difference = float((got.state[name] - want.state[name]).abs().max())
        size = float(want.state[name].abs().max())
        assert difference <= 1e-4 * farthest + 1e-6 * size, name
