"""Runs a plan and a single process side by side and compares them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.runtime.launch import launch
from graphpipe.runtime.pipeline import Pipeline
from tests.runtime.manual import Part, manual_plan
from tests.runtime.models import Example, build

Optimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.01)


@lru_cache(maxsize=64)
def example(name: str, dtype: torch.dtype = torch.float32) -> tuple[Example, ModelGraph]:
    """An example and its graph; captured once."""
    made = build(name, dtype=dtype)
    graph = capture(
        made.model, made.args, made.kwargs, targets=made.targets, loss_fn=made.loss_fn, name=name
    )
    return made, graph


def halves(made: Example, step: int) -> Example:
    """Another mini-batch for every step: the samples rolled."""

    def roll(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.roll(step, 0)
        if isinstance(value, dict):
            return {key: roll(item) for key, item in value.items()}
        if value is None:
            return None
        return tuple(roll(item) for item in value)

    return Example(made.model, roll(made.args), roll(made.targets), made.loss_fn, roll(made.kwargs))


History = list[tuple[float, dict[str, torch.Tensor]]]


def single_process(
    made: Example, optimizer: Optimizer, steps: int
) -> tuple[History, dict[str, torch.Tensor]]:
    """Losses, gradients of every step, and the final state, of plain full-batch training."""
    model = copy.deepcopy(made.model)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    chosen = optimizer(named)
    history: History = []
    for step in range(steps):
        batch = halves(made, step)
        chosen.zero_grad()
        loss = made.loss_fn(model(*batch.args, **batch.kwargs), batch.targets)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
        chosen.step()
        history.append((float(loss.detach()), gradients))
    return history, {name: value.clone() for name, value in model.state_dict().items()}


def pipeline_run(
    made: Example,
    graph: ModelGraph,
    plan: Plan,
    optimizer: Optimizer,
    steps: int,
    **options: Any,
) -> tuple[History, dict[str, torch.Tensor]]:
    """The same by a pipeline in this process (of its own ranks)."""
    pipe = Pipeline(made.model, plan, made.loss_fn, optimizer, graph=graph, **options)
    history: History = []
    for step in range(steps):
        batch = halves(made, step)
        loss = pipe.step(batch.args, batch.kwargs, targets=batch.targets)
        gradients = {
            name: p.grad.to_dense().clone()
            for name, p in pipe.named_parameters()
            if p.grad is not None
        }
        history.append((float(loss.detach()), gradients))
    state = pipe.state_dict()
    pipe.close()
    return history, state


def assert_same(
    got: tuple[History, dict[str, torch.Tensor]],
    want: tuple[History, dict[str, torch.Tensor]],
    tolerance: float,
    *,
    every_gradient: bool = True,
) -> None:
    """Compares losses, gradients and final states.

    ``every_gradient``: the run in ``got`` holds all ranks, so no gradient may be missing.
    """
    for (loss, gradients), (other, others) in zip(got[0], want[0], strict=True):
        assert abs(loss - other) <= tolerance * max(1.0, abs(other))
        if every_gradient:
            assert gradients.keys() == others.keys()
        for name, value in gradients.items():
            _close(value, others[name], tolerance, name)
    assert got[1].keys() == want[1].keys()
    for name, value in got[1].items():
        _close(value, want[1][name], tolerance, name)


def _close(value: torch.Tensor, other: torch.Tensor, tolerance: float, name: str) -> None:
    torch.testing.assert_close(
        value, other, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}"
    )


def check(
    name: str,
    parts: Sequence[Part],
    *,
    dtype: torch.dtype = torch.float32,
    processes: bool = False,
    steps: int = 5,
    options: dict[str, Any] | None = None,
    **plan_options: Any,
) -> Plan:
    """SGD in fp32 to 1e-6, or AdamW in float64 to 1e-10, against a single process."""
    made, graph = example(name, dtype)
    plan_options.setdefault("batch_size", 12)
    plan = manual_plan(graph, parts, **plan_options)
    optimizer, tolerance = (adamw, 1e-10) if dtype is torch.float64 else (sgd, 1e-6)
    want = single_process(made, optimizer, steps)
    if processes:
        results = launch(
            lambda: pipeline_run(made, graph, plan, optimizer, steps, **(options or {})),
            plan.world_size,
            timeout=60,
            threads=1,
            method="fork",
        )
        for got in results:
            assert_same(got, want, tolerance, every_gradient=False)
        names = {key for history, _ in results for key in history[0][1]}
        assert names == want[0][0][1].keys()
        assert len({history[0][0] for history, _ in results}) == 1  # one loss on every rank
        return plan
    got = pipeline_run(
        made, graph, plan, optimizer, steps, transport="in_process", **(options or {})
    )
    assert_same(got, want, tolerance)
    return plan


def parameters_of(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters()}
