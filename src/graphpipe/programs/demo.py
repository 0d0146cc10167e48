"""The demonstration: image and text towers on handwritten digits, trained as a graph.

The towers are branches of their own, so they are stages that run side by side, with small
micro-batches. The contrastive loss compares all samples of a mini-batch with one another,
so its stage runs with the whole mini-batch: the loss is the one of a single process.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import nn

from graphpipe.cost.analytic import estimate
from graphpipe.cost.cluster import Cluster
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.planner.constraints import Constraints
from graphpipe.planner.search import plan
from graphpipe.programs.planning import capture_job
from graphpipe.runtime.launch import launch
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.simulate.simulator import simulate
from graphpipe.simulate.timeline import Timeline
from graphpipe.zoo.digits import digits, load_digits
from graphpipe.zoo.job import Batch, Job
from graphpipe.zoo.transformer import Block

EQUALITY_STEPS = 5
EQUALITY_LEARNING_RATE = 0.005
"""The loss falls from 2.3 to 2.0 in the five steps. At ten times this rate the first steps are
unstable, and two single processes that cut the batch differently drift apart by 1e-6 too."""
EVALUATE_EVERY = 2
"""Epochs."""
MICRO_BATCHES = 4
"""Of the towers, in a mini-batch."""
DEVICE = "cpu-core"


@dataclass(frozen=True)
class Settings:
    """What can be chosen.

    Attributes:
        workers: Processes, each a device of the plan.
        batch_size: B, samples.
        epochs: Passes over the 1,437 training images.
        learning_rate: The largest of the schedule, for AdamW.
        seed: Of the initial values.
    """

    workers: int = 4
    batch_size: int = 128
    epochs: int = 10
    learning_rate: float = 2e-3
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Prepared:
    """What is known before a worker starts."""

    job: Job
    model: nn.Module
    graph: ModelGraph
    plan: Plan
    predicted: Timeline


@dataclass(frozen=True)
class Equality:
    """Largest absolute differences between the pipeline and one process.

    Attributes:
        steps: Steps of plain SGD in fp32 that both did.
        loss: Over the steps.
        parameters: After the last step, over all numbers of all parameters.
    """

    steps: int
    loss: float
    parameters: float


@dataclass(frozen=True, eq=False)
class Outcome:
    """What the demonstration found.

    Attributes:
        equality: See :class:`Equality`.
        losses: Of every step.
        accuracies: (epoch, zero-shot accuracy on held-out digits) now and then, the last one
            after the last epoch.
        seconds: Training, evaluations included.
        measured: The last step, as it ran.
    """

    equality: Equality
    losses: list[float]
    accuracies: list[tuple[int, float]]
    seconds: float
    measured: Timeline


class Listener(Protocol):
    """Is told what happens, in the process of rank 0."""

    def equality(self, found: Equality) -> None:
        """The comparison with one process is done; training begins."""

    def step(self, done: int, total: int, loss: float) -> None:
        """A step has been taken."""

    def epoch(self, epoch: int, loss: float, accuracy: float | None) -> None:
        """An epoch is over; ``loss`` is its mean. Now and then held-out digits are classified."""


def prepare(settings: Settings) -> Prepared:
    """Captures the model, plans for this machine's cores and simulates the plan.

    Raises:
        GraphPipeError: If no plan fits the settings.
    """
    # Workers are forked, and a thread pool of this process would not survive that.
    torch.set_num_threads(1)
    job = digits()
    torch.manual_seed(settings.seed)
    model = job.build_model()
    graph = capture_job(job, model)
    cluster = Cluster.uniform(DEVICE, nodes=1, per_node=settings.workers)
    costs = estimate(graph, cluster, optimizer="adamw")
    found = plan(
        graph,
        costs,
        cluster,
        batch_size=settings.batch_size,
        replicas=False,
        micro_batches=[max(1, settings.batch_size // MICRO_BATCHES)],
        constraints=_demands(model, settings.workers),
    )
    return Prepared(job, model, graph, found, simulate(found))


def _demands(model: nn.Module, workers: int) -> Constraints:
    """The text tower on the last device, the image tower on the others, no block cut.

    Left alone, the planner would give each device a replica of both towers, which is right
    for a model as small as this; here the pipeline is to be seen.
    """
    blocks = [name for name, module in model.named_modules() if isinstance(module, Block)]
    pin: dict[str, int] = {}
    if workers > 1:
        image = [name for name in blocks if name.startswith("image.")]
        pin = {name: i * (workers - 1) // len(image) for i, name in enumerate(image)}
        pin |= {"image.patches": 0, "image.project": max(pin.values()), "text": workers - 1}
    return Constraints(together=[[name] for name in blocks], pin=pin)


def run(prepared: Prepared, settings: Settings, listener: Listener) -> Outcome:
    """Starts the workers, compares, trains and evaluates.

    Raises:
        StageFailedError: If a worker fails.
    """
    arguments = (prepared, settings, listener)
    results = launch(_work, settings.workers, arguments, threads=1, method="fork")
    outcome: Outcome = results[0]
    return outcome


def _work(prepared: Prepared, settings: Settings, listener: Listener) -> Outcome | None:
    """What each worker does; rank 0 returns the outcome."""
    first = torch.distributed.get_rank() == 0
    equality = _compare(prepared, settings)
    if first:
        listener.equality(equality)
    return _train(prepared, settings, listener, equality, first)


def _compare(prepared: Prepared, settings: Settings) -> Equality:
    """The same steps by the pipeline and by this process alone (every rank does the latter)."""
    job = prepared.job
    model = copy.deepcopy(prepared.model)
    pipe = Pipeline(
        prepared.model,
        prepared.plan,
        job.loss_fn,
        lambda named: torch.optim.SGD(named, EQUALITY_LEARNING_RATE),
        graph=prepared.graph,
    )
    alone = torch.optim.SGD(model.parameters(), EQUALITY_LEARNING_RATE)
    loss_difference = 0.0
    for batch in islice(_endless(job, settings.batch_size), EQUALITY_STEPS):
        loss = pipe.step(batch.args, targets=batch.targets)
        assert job.loss_fn is not None
        expected = job.loss_fn(model(*batch.args), batch.targets)
        alone.zero_grad()
        expected.backward()
        alone.step()
        loss_difference = max(loss_difference, abs(float(loss) - float(expected.detach())))
    trained = pipe.state_dict(to=0)
    parameters = 0.0
    if trained:
        for name, value in model.state_dict().items():
            parameters = max(parameters, float((trained[name] - value).abs().max()))
    return Equality(EQUALITY_STEPS, loss_difference, parameters)


def _train(
    prepared: Prepared,
    settings: Settings,
    listener: Listener,
    equality: Equality,
    first: bool,
) -> Outcome | None:
    job = prepared.job
    assert job.data is not None
    pipe = Pipeline(
        prepared.model,
        prepared.plan,
        job.loss_fn,
        lambda named: torch.optim.AdamW(named, settings.learning_rate),
        graph=prepared.graph,
    )
    per_epoch = len(load_digits().train_labels) // settings.batch_size
    total = per_epoch * settings.epochs
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, total))
        for optimizer in pipe.optimizers
    ]
    losses: list[float] = []
    accuracies: list[tuple[int, float]] = []
    measured: Timeline | None = None
    start = time.monotonic()
    for epoch in range(settings.epochs):
        for batch in job.data(settings.batch_size, epoch):
            if len(losses) + 1 < total:
                loss = pipe.step(batch.args, targets=batch.targets)
            else:
                loss, measured = pipe.trace_step(batch.args, targets=batch.targets)
            for schedule in schedules:
                schedule.step()
            losses.append(float(loss))
            if first:
                listener.step(len(losses), total, losses[-1])
        accuracy: float | None = None
        if epoch % EVALUATE_EVERY == EVALUATE_EVERY - 1 or epoch + 1 == settings.epochs:
            state = pipe.state_dict(to=0)
            if state:
                plain = copy.deepcopy(prepared.model)
                plain.load_state_dict(state)
                accuracy = load_digits().zero_shot_accuracy(plain)
                accuracies.append((epoch + 1, accuracy))
        if first:
            listener.epoch(epoch + 1, sum(losses[-per_epoch:]) / per_epoch, accuracy)
    assert measured is not None
    seconds = time.monotonic() - start
    return Outcome(equality, losses, accuracies, seconds, measured) if first else None


def _rate(step: int, total: int) -> float:
    """Share of the largest learning rate: up in a fifth of the steps, then down as a cosine."""
    rise = max(1, total // 5)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, total - rise)))


def _endless(job: Job, batch_size: int) -> Iterator[Batch]:
    """The mini-batches of epoch 0, 1, 2, ..."""
    assert job.data is not None
    epoch = 0
    while True:
        yield from job.data(batch_size, epoch)
        epoch += 1
