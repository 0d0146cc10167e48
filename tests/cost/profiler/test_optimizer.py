"""Time of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from graphpipe.cost.profiler import optimizer
from graphpipe.cost.profiler.evict import Evictor
from graphpipe.cost.profiler.optimizer import OptimizerCosts, optimizer_costs
from graphpipe.cost.profiler.timing import Clock
from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from tests.cost.profiler.model import hard_graph

CPU = torch.device("cpu")


class Counting(Clock):
    """Stands for a device whose step takes 7 us a parameter and 2 ns a byte."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.steps: list[list[int]] = []

    def time(self, call: Callable[[], object]) -> tuple[float, object]:  # type: ignore[override]
        owner = call.__self__  # type: ignore[attr-defined]
        sizes = [p.numel() for group in owner.param_groups for p in group["params"]]
        self.steps.append(sizes)
        return 7e-6 * len(sizes) + 2e-9 * 4 * sum(sizes), call()


@pytest.mark.parametrize("name", ["sgd", "sgd-momentum", "adagrad", "adam", "adamw", "another"])
def test_every_optimizer_takes_time(name: str) -> None:
    graph = hard_graph()
    costs = optimizer_costs(name, graph, CPU, Clock(CPU), Evictor(graph, CPU))
    assert 1e-7 < costs.per_tensor < 1e-2
    assert 0 <= costs.per_byte < 1e-5


def test_both_parts_are_found_from_the_sizes_of_the_model() -> None:
    graph, clock = hard_graph(), Counting()
    costs = optimizer_costs("adamw", graph, CPU, clock, Evictor(graph, CPU))
    trained = [p.numel for p in graph.parameters if p.trainable and not p.is_buffer]
    assert sorted(clock.steps[-1]) == sorted(trained)
    assert costs.per_byte == pytest.approx(2e-9, rel=0.01)
    # A parameter of one element has four bytes.
    assert costs.per_tensor == pytest.approx(7e-6, rel=2e-3)


def test_the_first_micro_batch_adds_no_gradients() -> None:
    step = OptimizerCosts(10.0, 5.0).without_first([(2, 3.0), (4, 7.0)], 1.0)
    # 2 + 6 seconds for six bytes, and one for each parameter.
    assert step == OptimizerCosts(10.0 - 8.0 / 6.0, 4.0)
    assert OptimizerCosts(0.1, 0.1).without_first([(2, 3.0)], 1.0) == OptimizerCosts(0.0, 0.0)
    assert OptimizerCosts(1.0, 1.0).without_first([], 0.0) == OptimizerCosts(1.0, 1.0)


def test_large_models_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "MOST_BYTES", 4000)
    monkeypatch.setattr(optimizer, "LARGEST_BYTES", 400)
    graph, clock = hard_graph(), Counting()
    costs = optimizer_costs("sgd", graph, CPU, clock, Evictor(graph, CPU))
    assert max(clock.steps[-1]) == 100
    assert 4 * sum(clock.steps[-1]) <= 4000
    assert costs.per_byte == pytest.approx(2e-9, rel=0.05)


def _frozen() -> ModelGraph:
    model = nn.Linear(3, 3).requires_grad_(False)
    x = torch.randn(4, 3)
    return capture(model, (x,), targets=x, loss_fn=nn.functional.mse_loss)


def test_a_model_without_trainable_parameters_has_no_step() -> None:
    graph = _frozen()
    assert optimizer_costs("adamw", graph, CPU, Clock(CPU), Evictor(graph, CPU)) == (0.0, 0.0)
