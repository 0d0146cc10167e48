"""Losses that need the whole mini-batch, and counts that only the forward gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphpipe.errors import RuntimeSetupError
from tests.runtime.equality import adamw, assert_same, pipeline_run, sgd, single_process
from tests.runtime.manual import Part, manual_plan
from tests.runtime.models import Example
from tests.runtime.reference import captured


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.text = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        a = functional.normalize(self.image(image), dim=1)
        b = functional.normalize(self.text(text), dim=1)
        return self.scale.exp() * a @ b.t()


def contrastive(logits: torch.Tensor) -> torch.Tensor:
    """The symmetric in-batch loss."""
    rows = -functional.log_softmax(logits, 1).diagonal().mean()
    columns = -functional.log_softmax(logits, 0).diagonal().mean()
    return (rows + columns) / 2


@pytest.mark.filterwarnings("ignore::graphpipe.graph.capture.CoupledBatchWarning")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_contrastive_loss_over_the_whole_batch_is_exact(
    recompute: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = Towers().to(dtype)
    inputs = (torch.randn(12, 6, dtype=dtype), torch.randn(12, 5, dtype=dtype))
    made, graph = captured(Example(model, inputs, None, lambda out, _: contrastive(out)))
    rest = " ".join(op.name for op in graph.ops if op.module in ("", "loss_fn"))
    parts = [
        Part("image", 2, recompute=recompute),
        Part("text", 3, replicas=2, recompute=recompute),
        Part(rest, 12),
    ]
    plan = manual_plan(graph, parts, batch_size=12)
    assert all(stage.in_flight == 12 for stage in plan.stages)
    optimizer, tolerance = (adamw, 1e-10) if dtype is torch.float64 else (sgd, 1e-6)
    got = pipeline_run(made, graph, plan, optimizer, 5, transport="in_process")
    assert_same(got, single_process(made, optimizer, 5), tolerance)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.gate = nn.Linear(8, 1)
        self.b = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.a(x).tanh()
        return self.b(h).squeeze(1), self.gate(h).squeeze(1)


def mean_over_open_gates(
    output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, count): the count is the number of gates that the model itself opened."""
    value, gate = output
    chosen = gate > 0
    return ((value - target).square() * chosen).sum(), chosen.sum()


def _quotient(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    total, count = mean_over_open_gates(output, target)
    return total / count


def test_a_count_that_the_model_decides_needs_the_whole_batch_in_one_stage() -> None:
    torch.manual_seed(0)
    made, graph = captured(
        Example(Gated(), (torch.randn(12, 6),), torch.randn(12), mean_over_open_gates)
    )
    assert not graph.loss_terms[0].count_from_inputs
    rest = " ".join(op.name for op in graph.ops if not op.module.startswith("a"))
    plan = manual_plan(graph, [Part("a", 3), Part(rest, 12)], batch_size=12)
    got = pipeline_run(made, graph, plan, sgd, 3, transport="in_process")
    reference = Example(made.model, made.args, made.targets, _quotient)
    assert_same(got, single_process(reference, sgd, 3), 1e-6)
    small = manual_plan(graph, [Part("a", 3), Part(rest, 6)], batch_size=12)
    with pytest.raises(RuntimeSetupError, match="whole mini-batch at once"):
        pipeline_run(made, graph, small, sgd, 1, transport="in_process")
