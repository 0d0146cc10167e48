from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from graphpipe.errors import PlanError, RuntimeSetupError
from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.report.torch_pipelining import TorchChain
from graphpipe.report.torch_schedule import torch_schedule_csv
from graphpipe.runtime.launch import launch
from tests.runtime.manual import Part, manual_plan


class Chain(nn.Module):
    """A mask reaches the middle, labels the end; two tensors cross the second boundary."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        h = self.a(x).tanh()
        g = self.b(h).tanh() * scale
        return self.c(g + 2 * g.sin())


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target) + 0.1 * output.square().sum()


def batch() -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, scale = (torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (6, 1))
    return (x,), {"scale": scale}, torch.arange(8) % 3


@cache
def captured() -> tuple[nn.Module, ModelGraph]:
    """The model and its graph; workers are forked and so have them already."""
    model = Chain().double()
    args, kwargs, targets = batch()
    return model, capture(model, args, kwargs, targets=targets, loss_fn=loss_fn)


def chain_plan(graph: ModelGraph, micro_batch: int = 2, **more: Any) -> Plan:
    parts = [Part(name, micro_batch) for name in ("a", "b", "c")]
    return manual_plan(graph, parts, batch_size=8, **more)


Result = tuple[float | None, dict[str, torch.Tensor]]
KINDS = ("plan", "1f1b", "gpipe")


def train(folder: str) -> list[Result]:
    """One step by each schedule, on one rank: the loss and the gradients of its parameters."""
    _, graph = captured()
    plan = chain_plan(graph)
    return [step(graph, plan, kind, Path(folder)) for kind in KINDS]


def step(graph: ModelGraph, plan: Plan, kind: str, folder: Path) -> Result:
    chain = TorchChain(graph, plan, torch.distributed.get_rank())
    schedule: Any
    if kind == "plan":
        schedule = _PipelineScheduleRuntime(
            chain.stages, chain.micro_batches, loss_fn=chain.loss_fn
        )
        schedule._load_csv(str(folder / "schedule.csv"))
    else:
        made = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[kind]
        schedule = made(chain.stages[0], chain.micro_batches, loss_fn=chain.loss_fn)
    args, kwargs, targets = batch()
    loss = chain.step(schedule, args, kwargs, targets=targets)
    gradients = {}
    for module in chain.modules:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                gradients[name.removeprefix("stage.")] = parameter.grad
                parameter.grad = None
    return None if loss is None else loss.item(), gradients


def test_torch_trains_a_chain_plan_as_one_process_does(tmp_path: Path) -> None:
    """By the plan's own schedule, and by two of torch's."""
    model, graph = captured()
    (tmp_path / "schedule.csv").write_text(torch_schedule_csv(chain_plan(graph)))
    args, kwargs, targets = batch()
    by_rank = launch(train, 3, (str(tmp_path),), timeout=60.0, method="fork")
    loss = loss_fn(model(*args, **kwargs), targets)
    loss.backward()
    for results in zip(*by_rank, strict=True):
        assert results[0][0] is results[1][0] is None
        assert results[2][0] == pytest.approx(loss.item(), abs=1e-12)
        gradients = {name: grad for _, part in results for name, grad in part.items()}
        assert gradients.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12)


def test_a_graph_without_a_program_is_refused() -> None:
    _, graph = captured()
    bare = ModelGraph.from_json(graph.to_json())
    with pytest.raises(RuntimeSetupError, match="has no program"):
        TorchChain(bare, chain_plan(graph), 0)


def test_a_plan_that_is_no_chain_is_refused() -> None:
    _, graph = captured()
    with pytest.raises(PlanError, match="it has several copies"):
        TorchChain(graph, chain_plan(graph, micro_batch=1, copies=2), 0)


def test_a_loss_that_torch_would_not_weigh_right_is_refused() -> None:
    model = Chain().double()
    args, kwargs, targets = batch()

    def late_count(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return output.sum(), (output > 0).sum()

    graph = capture(model, args, kwargs, targets=targets, loss_fn=late_count)
    with pytest.raises(PlanError, match=r"takes one loss from the last stage.*sum_count"):
        TorchChain(graph, chain_plan(graph), 0)
