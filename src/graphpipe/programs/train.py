"""Trains a job by a plan, on worker processes of this machine or under torchrun."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import nn

from graphpipe.cost.analytic import estimate
from graphpipe.cost.cluster import Cluster
from graphpipe.errors import CheckpointError, InputError
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.planner.search import plan as search
from graphpipe.programs.elastic import elastic_plan
from graphpipe.programs.planning import capture_job
from graphpipe.runtime.launch import launch
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.simulate.timeline import Timeline
from graphpipe.zoo.job import Batch, Job, NamedParameters
from graphpipe.zoo.load import load_job

HERE = "cpu-core"
"""Kind of device of workers on this machine."""

OPTIMIZERS: dict[str, Callable[[NamedParameters, float], torch.optim.Optimizer]] = {
    "sgd": lambda named, rate: torch.optim.SGD(named, rate),
    "sgd-momentum": lambda named, rate: torch.optim.SGD(named, rate, momentum=0.9),
    "adagrad": lambda named, rate: torch.optim.Adagrad(named, rate),
    "adam": lambda named, rate: torch.optim.Adam(named, rate),
    "adamw": lambda named, rate: torch.optim.AdamW(named, rate),
}
"""Optimizers by the names that the cost estimate knows."""


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        steps: Optimizer steps; the job's data is gone through as often as that takes. None:
            one epoch.
        optimizer: A name in :data:`OPTIMIZERS`; None: the job's own, else ``adamw``.
        learning_rate: For a named optimizer.
        clip_norm: Largest norm of the gradient, if any.
        seed: Of initial values and random ops.
        trace: Whether the last step is measured task by task.
        save: Folder for checkpoints, if any are wanted; one is saved at the end.
        save_every: Steps between checkpoints; None: at the end only.
        keep: How many checkpoints stay; None: all.
        resume: Whether to go on from the newest checkpoint in ``save``, if there is one.
        elastic: Whether to plan for the ranks that torchrun started this time; resumes.
        timeout: Seconds after which a rank that does not answer, or a task that does not end, is
            a failure.
        history: File to which every step is appended: ``{"step": , "loss": , "workers": }``.
    """

    steps: int | None = None
    optimizer: str | None = None
    learning_rate: float = 1e-3
    clip_norm: float | None = None
    seed: int = 0
    trace: bool = False
    save: Path | None = None
    save_every: int | None = None
    keep: int | None = None
    resume: bool = False
    elastic: bool = False
    timeout: float = 1800.0
    history: Path | None = None

    def check(self) -> None:
        """Refuses what contradicts itself.

        Raises:
            InputError: Saying what is missing.
        """
        if self.optimizer is not None and self.optimizer not in OPTIMIZERS:
            raise InputError(
                "Unknown optimizer",
                expected=f"one of {', '.join(OPTIMIZERS)}",
                got=repr(self.optimizer),
            )
        if self.save is None and (self.save_every or self.keep or self.resume or self.elastic):
            raise InputError(
                "No folder for checkpoints was given",
                got="--save-every, --keep, --resume or --elastic without --save",
                fix="Give --save DIR",
            )
        if self.elastic and not under_torchrun():
            raise InputError(
                "Elastic training is started by torchrun",
                expected="a worker of torchrun --nnodes MIN:MAX",
                got="--elastic in a process of its own",
                fix="docs/elastic.md shows the whole command",
            )


@dataclass(frozen=True, eq=False)
class Prepared:
    """A job with the plan to train it by, the same in every process."""

    job: Job
    model: nn.Module
    graph: ModelGraph
    plan: Plan


@dataclass(frozen=True, eq=False)
class Outcome:
    """What training gave.

    Attributes:
        losses: Of every step.
        seconds: For all steps.
        measured: The last step as it ran, if it was asked for.
        state: Trained parameters and buffers by name, if they were asked for.
    """

    losses: list[float]
    seconds: float
    measured: Timeline | None
    state: dict[str, torch.Tensor]


class Listener(Protocol):
    """Is told of progress, in the process of rank 0."""

    def __call__(self, done: int, total: int, loss: float) -> None:
        """A step has been taken."""


def save_state(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Writes values by name as a safetensors file, in one step.

    Names that share a value (tied parameters) are each written.
    """
    apart = {name: value.clone().contiguous() for name, value in state.items()}
    half = path.with_name(path.name + ".partial")
    save_file(apart, half)
    half.replace(path)


def under_torchrun() -> bool:
    """Whether this process is a worker that somebody else started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def prepare(
    model: str,
    settings: Settings,
    *,
    plan: Path | None = None,
    workers: int | None = None,
    batch_size: int | None = None,
) -> Prepared:
    """Builds and captures the model, and reads or searches a plan.

    Args:
        model: ``zoo:NAME`` or ``file.py:factory``.
        settings: How to train.
        plan: A plan's file. None: one is searched for ``workers`` cores of this machine.
        workers: Number of workers where no plan is given; those of torchrun under it.
        batch_size: B for a plan that is searched; the job's own by default.

    Raises:
        InputError: If what is asked for is contradictory or unknown, or the job has no data.
        GraphPipeError: Whatever is wrong with model or plan.
    """
    # Workers are forked, and a thread pool of this process would not survive that.
    torch.set_num_threads(1)
    settings.check()
    if settings.elastic and plan is not None:
        raise InputError(
            "A plan is for one number of devices, and elastic training for any",
            got=f"--elastic --plan {plan}",
            fix="Leave --plan out",
        )
    if plan is not None and batch_size is not None:
        raise InputError(
            "Both a plan and a batch size were given",
            got=f"--plan {plan} --batch-size {batch_size}",
            fix="A plan is for one batch size: leave --batch-size out, or plan again",
        )
    job = load_job(model)
    if job.data is None:
        raise InputError(
            "The job has no data to train on",
            where=model,
            fix="Give graphpipe.Job(..., data=f); f(batch_size, epoch) yields graphpipe.Batch",
        )
    torch.manual_seed(settings.seed)
    module = job.build_model()
    graph = capture_job(job, module)
    if plan is not None:
        return Prepared(job, module, graph, _planned(plan, workers))
    count = int(os.environ["WORLD_SIZE"]) if under_torchrun() else workers or 2
    size = batch_size or job.batch_size
    if size is None:
        raise InputError(
            "The size of the mini-batch is not known", where=model, fix="Give --batch-size"
        )
    if settings.elastic:
        chosen = settings.optimizer or "adamw"
        found = elastic_plan(
            graph, batch_size=size, device=HERE, optimizer=chosen, timeout=settings.timeout
        )
        return Prepared(job, module, graph, found)
    cluster = Cluster.uniform(HERE, nodes=1, per_node=count)
    costs = estimate(graph, cluster, optimizer=settings.optimizer or "adamw")
    return Prepared(job, module, graph, search(graph, costs, cluster, batch_size=size))


def _planned(path: Path, workers: int | None) -> Plan:
    plan = Plan.load(path)
    if workers is not None and workers != plan.world_size:
        raise InputError(
            "The plan is for another number of workers",
            where=str(path),
            expected=f"--workers {plan.world_size}, or none",
            got=f"--workers {workers}",
            fix=f"Leave --workers out, or plan for {workers} devices",
        )
    return plan


def train(
    prepared: Prepared, settings: Settings, listener: Listener, *, keep_state: bool = False
) -> Outcome | None:
    """Trains; starts the workers unless this process is one already.

    Args:
        prepared: What :func:`prepare` returned.
        settings: How to train.
        listener: Told of every step.
        keep_state: Whether the trained parameters come back.

    Returns:
        The outcome; None on ranks other than 0 under torchrun.

    Raises:
        StageFailedError: If a worker fails.
        RuntimeSetupError: If plan and workers do not fit together.
    """
    if under_torchrun():
        return _work(prepared, settings, listener, keep_state)
    results = launch(
        _work,
        prepared.plan.world_size,
        (prepared, settings, listener, keep_state),
        timeout=settings.timeout,
        method="fork",
    )
    outcome: Outcome = results[0]
    return outcome


def _work(
    prepared: Prepared, settings: Settings, listener: Listener, keep_state: bool
) -> Outcome | None:
    """What every rank does."""
    job, plan = prepared.job, prepared.plan
    pipe = Pipeline(
        prepared.model,
        plan,
        job.loss_fn,
        _optimizer(job, settings),
        graph=prepared.graph,
        clip_norm=settings.clip_norm,
        seed=settings.seed,
        timeout=settings.timeout,
    )
    first = torch.distributed.get_rank() == 0
    losses: list[float] = []
    measured: Timeline | None = None
    position = Position()
    if settings.save is not None and (settings.resume or settings.elastic):
        position = Position.of(pipe.load(settings.save, missing_ok=True))
        if position.step != pipe.iterations:
            raise CheckpointError(
                "The checkpoint does not say where in the data training is",
                where=str(settings.save),
                expected="one saved by graphpipe train",
                got=f"one after {pipe.iterations} mini-batches, with data at {position.step}",
            )
    start = time.monotonic()
    batches, total = _batches(job, plan.batch_size, settings.steps, position)
    for batch, following in batches:
        if settings.trace and following.step == total:
            loss, measured = pipe.trace_step(batch.args, batch.kwargs, targets=batch.targets)
        else:
            loss = pipe.step(batch.args, batch.kwargs, targets=batch.targets)
        losses.append(float(loss))
        if first:
            listener(following.step, total, losses[-1])
            if settings.history is not None:
                _append(settings.history, following.step, losses[-1], plan.world_size)
        every = settings.save_every
        if settings.save is not None and (
            following.step == total or (every is not None and following.step % every == 0)
        ):
            pipe.save(settings.save, data=following.facts(), keep=settings.keep)
    seconds = time.monotonic() - start
    state = pipe.state_dict(to=0) if keep_state else {}
    pipe.close()
    return Outcome(losses, seconds, measured, state) if first else None


@dataclass(frozen=True)
class Position:
    """How far the data has been gone through.

    Attributes:
        step: Mini-batches trained on.
        epoch: The epoch that the next one is of.
        batch: Its number in the epoch.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0

    def facts(self) -> dict[str, int]:
        """As plain data, for a checkpoint."""
        return {"step": self.step, "epoch": self.epoch, "batch": self.batch}

    @classmethod
    def of(cls, facts: object) -> Position:
        """From a checkpoint's data, or the beginning where there is none.

        Raises:
            CheckpointError: If the checkpoint is of a program that keeps another position.
        """
        if facts is None:
            return cls()
        fields = ("step", "epoch", "batch")
        if not isinstance(facts, dict) or not all(type(facts.get(f)) is int for f in fields):
            raise CheckpointError(
                "The checkpoint does not say where in the data training is",
                expected="one saved by graphpipe train",
                got=repr(facts)[:60],
            )
        return cls(*(facts[f] for f in fields))


def _append(path: Path, step: int, loss: float, workers: int) -> None:
    line = json.dumps({"step": step, "loss": loss, "workers": workers})
    with path.open("a", encoding="utf-8") as out:
        out.write(line + "\n")


def _optimizer(job: Job, settings: Settings) -> Callable[[NamedParameters], torch.optim.Optimizer]:
    if settings.optimizer is None and job.optimizer is not None:
        return job.optimizer
    make = OPTIMIZERS[settings.optimizer or "adamw"]
    return lambda named: make(named, settings.learning_rate)


def _batches(
    job: Job, batch_size: int, steps: int | None, start: Position
) -> tuple[Iterator[tuple[Batch, Position]], int]:
    """The mini-batches to train on from ``start``, each with the position after it, and how
    many there are in all."""
    assert job.data is not None
    data = job.data
    if steps is None:
        epoch = [_checked(batch) for batch in data(batch_size, 0)]
        _refuse_empty(len(epoch), batch_size)
        left = epoch[start.batch :] if start.epoch == 0 else []
        after = itertools.count(start.step + 1)
        return ((batch, Position(n, 0, n)) for batch, n in zip(left, after, strict=False)), len(
            epoch
        )

    def endless() -> Iterator[tuple[Batch, Position]]:
        step = start.step
        for epoch in itertools.count(start.epoch):
            seen = 0
            for number, batch in enumerate(data(batch_size, epoch)):
                seen += 1
                if epoch == start.epoch and number < start.batch:
                    continue  # the order of an epoch is the same every time
                step += 1
                yield _checked(batch), Position(step, epoch, number + 1)
            _refuse_empty(seen, batch_size)

    return itertools.islice(endless(), max(0, steps - start.step)), steps


def _checked(batch: object) -> Batch:
    if not isinstance(batch, Batch):
        raise InputError(
            "The job's data must yield mini-batches of the type Batch",
            where="Job.data",
            expected="graphpipe.Batch(args=(...), kwargs={...}, targets=...)",
            got=f"a {type(batch).__name__}",
            fix="Wrap what data(batch_size, epoch) yields in graphpipe.Batch",
        )
    return batch


def _refuse_empty(batches: int, batch_size: int) -> None:
    if batches == 0:
        raise InputError(
            "The job's data has no mini-batch",
            got=f"nothing for {batch_size} samples a mini-batch",
            fix="Choose a smaller --batch-size",
        )
