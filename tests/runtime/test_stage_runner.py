"""Recomputation, buffers and randomness of one stage."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphpipe.graph.capture import CoupledBatchWarning
from graphpipe.graph.model_graph import ModelGraph
from tests.runtime.equality import adamw, assert_same, halves, pipeline_run, sgd
from tests.runtime.manual import Part, manual_plan
from tests.runtime.models import Example, mean_square
from tests.runtime.reference import captured, micro_batch_loop


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.b = nn.Linear(8, 8)
        self.norm2 = nn.BatchNorm1d(8)
        self.c = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.a(x)).relu()
        return self.c(self.norm2(self.b(h)).relu())


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 16)
        self.b = nn.Linear(16, 16)
        self.c = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.dropout(self.a(x), 0.5, self.training)
        h = functional.dropout(self.b(h).relu(), 0.25, self.training)
        return self.c(h)


class Spectral(nn.Module):
    """A buffer that the forward both changes and uses, and that its backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(6, 6) / 2)
        self.register_buffer("u", torch.randn(6))
        self.c = nn.Linear(6, 2)
        self.u: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.u.copy_(functional.normalize(self.weight @ self.u, dim=0) + 0.1)
        scale = (self.weight.t() @ self.u).norm()
        return self.c(self.a(x) @ (self.weight / scale))


def _example(model: nn.Module) -> Example:
    torch.manual_seed(1)
    return Example(model, (torch.randn(12, 6),), torch.randn(12, 2), mean_square)


@pytest.mark.filterwarnings("ignore::graphpipe.graph.capture.CoupledBatchWarning")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", [Normed, Spectral])
def test_buffers_that_a_forward_changes_equal_a_micro_batch_loop(
    kind: type[nn.Module], recompute: bool
) -> None:
    torch.manual_seed(0)
    made, graph = captured(_example(kind()))
    # All that depends on the changing buffer must be in one stage.
    rest = " ".join(op.name for op in graph.ops if op.module != "a")
    first, second = ("a norm", "b norm2 c") if kind is Normed else ("a", rest)
    parts = [Part(first, 3, recompute=recompute), Part(second, 3, recompute=recompute)]
    plan = manual_plan(graph, parts, batch_size=12, slack=2)
    want = micro_batch_loop(made, sgd, 3, micro_batch=3)
    got = pipeline_run(made, graph, plan, sgd, 3, transport="in_process")
    assert_same(got, want, 1e-6)


@pytest.mark.filterwarnings("ignore::graphpipe.graph.capture.CoupledBatchWarning")
def test_replicas_go_on_with_the_buffers_of_replica_0() -> None:
    torch.manual_seed(0)
    made, graph = captured(_example(Normed()))
    plan = manual_plan(
        graph, [Part("a norm", 3, replicas=2), Part("b norm2 c", 3)], batch_size=12, copies=1
    )
    _, state = pipeline_run(made, graph, plan, sgd, 1, transport="in_process")
    # Replica 0 ran micro-batches 0 and 2.
    norm = nn.BatchNorm1d(8)
    with torch.no_grad():
        hidden = made.model.a(made.args[0])  # type: ignore[operator]
        norm(hidden[0:3])
        norm(hidden[6:9])
    torch.testing.assert_close(state["norm.running_mean"], norm.running_mean)
    torch.testing.assert_close(state["norm.running_var"], norm.running_var)
    assert int(state["norm.num_batches_tracked"]) == 2


@lru_cache
def _dropped() -> tuple[Example, ModelGraph]:
    torch.manual_seed(0)
    return captured(_example(Dropped()))


def _dropout_run(parts: list[Part], **options: Any) -> Any:
    made, graph = _dropped()
    plan_options = {k: options.pop(k) for k in ("copies",) if k in options}
    plan = manual_plan(graph, parts, batch_size=12, **plan_options)
    return pipeline_run(made, graph, plan, adamw, 3, transport="in_process", **options)


@pytest.mark.parametrize(
    "parts",
    [
        [Part("a", 3, recompute=True), Part("b c", 3, recompute=True)],
        [Part("a dropout b dropout_1 c", 3)],
        [Part("a", 3), Part("dropout", 3), Part("b", 3, replicas=2), Part("dropout_1 c", 3)],
        [Part("a", 3, (0,)), Part("dropout b", 3, (1,)), Part("dropout_1 c", 3, (0,))],
    ],
    ids=["recomputed", "one stage", "four stages, replicas", "shared device"],
)
def test_the_same_micro_batch_size_gives_the_same_masks_whatever_the_plan(
    parts: list[Part],
) -> None:
    want = _dropout_run([Part("a", 3), Part("b c", 3)])
    assert_same(_dropout_run(parts), want, 1e-6)


def test_masks_depend_on_seed_and_step_and_leave_the_user_s_generator_alone() -> None:
    parts = [Part("a", 3), Part("b c", 3)]
    one = _dropout_run(parts, seed=1)
    other = _dropout_run(parts, seed=2)
    assert one[0][0][0] != other[0][0][0]
    made, graph = _dropped()
    plan = manual_plan(graph, parts, batch_size=12)
    torch.manual_seed(7)
    want = torch.rand(3)
    torch.manual_seed(7)
    pipeline_run(made, graph, plan, sgd, 1, transport="in_process")
    assert torch.equal(torch.rand(3), want)


def test_a_coupled_stage_warns_once_and_halves_are_different_batches() -> None:
    made = _example(Normed())
    with pytest.warns(CoupledBatchWarning):
        captured(made)
    assert not torch.equal(halves(made, 1).args[0], made.args[0])
