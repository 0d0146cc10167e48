"""Training that is cut in two by a checkpoint, for comparison with training that is not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.runtime.pipeline import Pipeline
from tests.runtime.equality import Optimizer, halves
from tests.runtime.models import Example, cross_entropy

Schedule = Callable[[torch.optim.Optimizer], Any]


class Dropping(nn.Module):
    """Two branches with dropout and a BatchNorm, so randomness and buffers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.a = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))
        self.b = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.stem(x)).relu()
        return self.head(torch.cat([self.a(h).relu(), self.b(h).tanh()], 1))


def dropping() -> tuple[Example, ModelGraph]:
    torch.manual_seed(3)
    made = Example(Dropping(), (torch.randn(12, 6),), torch.randint(0, 3, (12,)), cross_entropy)
    graph = capture(made.model, made.args, targets=made.targets, loss_fn=made.loss_fn)
    return made, graph


State = tuple[list[float], dict[str, torch.Tensor]]


def run(
    made: Example,
    graph: ModelGraph,
    plan: Plan,
    optimizer: Optimizer,
    steps: Sequence[int],
    *,
    schedule: Schedule | None = None,
    load: Path | None = None,
    save: Path | None = None,
    background: bool = False,
    **options: Any,
) -> State:
    """Losses of the steps and the state after them; starts from ``load``, ends by ``save``."""
    # Whatever is loaded, it is not what the model has.
    model = made.model
    if load is not None:
        model = copy.deepcopy(made.model)
        with torch.no_grad():
            for value in model.state_dict().values():
                value.add_(1)
    pipe = Pipeline(model, plan, made.loss_fn, optimizer, graph=graph, **options)
    schedulers = [] if schedule is None else [schedule(item) for item in pipe.optimizers]
    if load is not None:
        position = pipe.load(load, schedulers=schedulers)
        assert position == {"batch": steps[0]}
        assert pipe.iterations == steps[0]
    losses = []
    for step in steps:
        batch = halves(made, step)
        losses.append(float(pipe.step(batch.args, batch.kwargs, targets=batch.targets)))
        for scheduler in schedulers:
            scheduler.step()
    if save is not None:
        handle = pipe.save(
            save, schedulers=schedulers, data={"batch": steps[-1] + 1}, background=background
        )
        handle.wait()
    state = pipe.state_dict()
    pipe.close()
    return losses, state


def assert_equal(got: State, want: State) -> None:
    """Bit by bit."""
    assert got[0] == want[0]
    assert got[1].keys() == want[1].keys()
    for name, value in got[1].items():
        assert torch.equal(value, want[1][name]), name


def assert_close(got: State, want: State, tolerance: float) -> None:
    for loss, other in zip(got[0], want[0], strict=True):
        assert abs(loss - other) <= tolerance * max(1.0, abs(other))
    assert got[1].keys() == want[1].keys()
    for name, value in got[1].items():
        torch.testing.assert_close(value, want[1][name], rtol=tolerance, atol=tolerance)
