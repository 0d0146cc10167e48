"""Training as people do it: low-rank adapters, sparse optimizers, fp16 with a loss scale."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from graphpipe.graph.capture import capture
from graphpipe.runtime.optimize import LossScale
from graphpipe.runtime.pipeline import Pipeline
from tests.runtime.equality import example, halves
from tests.runtime.manual import Part, manual_plan
from tests.runtime.models import Example


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank addition."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Tuned(nn.Module):
    """A frozen stem, then frozen layers with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.stem.requires_grad_(False)
        self.one = Adapted(8, 2)
        self.two = Adapted(8, 2)
        self.head = nn.Linear(8, 3)
        self.head.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.two(self.one(self.stem(x).tanh()).tanh()).tanh())


@pytest.mark.parametrize("recompute", [False, True])
def test_adapters_on_a_frozen_base_train_alone(recompute: bool) -> None:
    torch.manual_seed(0)
    model = Tuned().double()
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    graph = capture(model, (x,), targets=y, loss_fn=mse_loss)
    plan = manual_plan(
        graph,
        [Part("stem", 2), Part("one", 4, replicas=3, recompute=recompute), Part("two", 2),
         Part("head", 4)],
        batch_size=12,
    )  # fmt: skip
    # Nothing before the first adapter has a backward, and its edge carries no gradient.
    assert [stage.has_backward for stage in plan.stages] == [False, True, True, True]
    assert not any(t.has_gradient for edge in plan.edges if edge.source == 0 for t in edge.tensors)

    def adam(named: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named, 0.01)

    pipe = Pipeline(model, plan, mse_loss, adam, graph=graph, transport="in_process")
    twin = copy.deepcopy(model)
    trained = [(name, p) for name, p in twin.named_parameters() if p.requires_grad]
    chosen = adam(trained)
    assert {name for name, _ in pipe.named_parameters()} == {name for name, _ in trained}
    assert all("up" in name or "down" in name for name, _ in trained)
    for step in range(3):
        loss = pipe.step((x.roll(step, 0),), targets=y.roll(step, 0))
        chosen.zero_grad()
        other = mse_loss(twin(x.roll(step, 0)), y.roll(step, 0))
        other.backward()
        chosen.step()
        assert float(loss) == pytest.approx(float(other.detach()), rel=1e-10)
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[name], rtol=1e-10, atol=1e-10)
    for worker in pipe.workers:
        assert worker.optimizer is not None
        states = sum("exp_avg" in state for state in worker.optimizer.state.values())
        assert states == len(worker.parameters)


class Tables(nn.Module):
    """Sparse tables that meet a dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            [nn.EmbeddingBag(40, 4, mode="sum", sparse=True) for _ in range(2)]
        )
        self.top = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        parts = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return self.top(torch.cat(parts, 1)).squeeze(1)


def _sparse_adam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """SparseAdam where there are tables, SGD elsewhere: what a rank needs, it builds."""
    if all(name.startswith("tables") for name, _ in named):
        return torch.optim.SparseAdam([p for _, p in named], lr=0.05)
    return torch.optim.SGD(named, lr=0.1)


def test_sparse_adam_updates_the_rows_that_were_read() -> None:
    torch.manual_seed(0)
    model = Tables()
    ids, target = torch.randint(0, 20, (12, 2, 3)), torch.rand(12)
    loss_fn = binary_cross_entropy_with_logits
    graph = capture(model, (ids,), targets=target, loss_fn=loss_fn)
    plan = manual_plan(
        graph,
        [Part("tables.0 select", 2, replicas=2), Part("tables.1", 4), Part("cat top", 4)],
        batch_size=12,
    )
    pipe = Pipeline(model, plan, loss_fn, _sparse_adam, graph=graph, transport="in_process")
    kinds = {type(worker.optimizer).__name__ for worker in pipe.workers}
    assert kinds == {"SparseAdam", "SGD"}
    twin = copy.deepcopy(model)
    named = list(twin.named_parameters())
    optimizers = [
        _sparse_adam([item for item in named if item[0].startswith("tables")]),
        _sparse_adam([item for item in named if not item[0].startswith("tables")]),
    ]
    for step in range(3):
        batch, labels = ids.roll(step, 0), target.roll(step, 0)
        loss = pipe.step((batch,), targets=labels)
        other = loss_fn(twin(batch), labels)
        twin.zero_grad()
        other.backward()
        for optimizer in optimizers:
            optimizer.step()
        assert float(loss) == pytest.approx(float(other.detach()), rel=1e-6)
    state = pipe.state_dict()
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    # Rows that no sample read are as they were.
    assert torch.equal(state["tables.0.weight"][20:], model.tables[0].weight[20:])


def test_fp16_skips_the_steps_that_a_gradient_scaler_skips() -> None:
    made, graph = example("diamond")
    first = 2.0**22
    # Whole mini-batches: partial sums of gradients would overflow at other scales than the sum.
    parts = [Part("stem", 12), Part("a", 12), Part("b", 12, (2,)), Part("cat", 12, (0,))]
    plan = manual_plan(graph, parts, batch_size=12)
    scale = LossScale(initial=first, growth_interval=3)

    def sgd(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(named, lr=0.05)

    pipe = Pipeline(
        made.model, plan, made.loss_fn, sgd, graph=graph, transport="in_process",
        autocast=torch.float16, loss_scale=scale,
    )  # fmt: skip
    model = copy.deepcopy(made.model)
    chosen = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=3)
    skipped: list[bool] = []
    for step in range(12):
        batch: Example = halves(made, step)
        loss = pipe.step(batch.args, targets=batch.targets)
        chosen.zero_grad()
        with torch.autocast("cpu", torch.float16):
            other = made.loss_fn(model(*batch.args), batch.targets)
        scaler.scale(other).backward()
        before = scaler.get_scale()
        scaler.step(chosen)
        scaler.update()
        skipped.append(pipe.last_step_skipped)
        assert skipped[-1] == (scaler.get_scale() < before)
        assert float(loss) == pytest.approx(float(other.detach()), abs=5e-3)
        for worker in pipe.workers:  # one decision on all ranks
            assert worker.scale is not None
            assert worker.scale.scale == scaler.get_scale()
    assert any(skipped)
    assert not all(skipped)
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0.01, atol=0.01)
