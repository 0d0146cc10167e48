"""Hard cases of the runtime: ties, frozen towers, scales, traffic both ways, resuming."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphpipe as gp
from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.runtime.launch import launch
from graphpipe.runtime.pipeline import Pipeline
from tests.cases.models import BATCH, Case, captured, load, plan_of
from tests.cases.test_behaviour import some_cut
from tests.cases.test_models import legal_cut
from tests.runtime.manual import Part, manual_plan

Optimizer = Callable[[Any], torch.optim.Optimizer]


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, lr=0.01)


def run_pipe(case: Case, plan: Plan, optimizer: Optimizer = sgd, **options: Any) -> Pipeline:
    graph = options.pop("graph", None) or captured(case.name)
    options.setdefault("transport", "in_process")
    return Pipeline(case.model, plan, case.loss_fn, optimizer, graph=graph, **options)


def rolled(case: Case, step: int) -> tuple[tuple[Any, ...], Any]:
    """Another mini-batch for every step."""
    args = tuple(value.roll(step, 0) for value in case.args)
    return args, case.targets.roll(step, 0)


def plain_loss(case: Case, step: int) -> torch.Tensor:
    args, targets = rolled(case, step)
    assert case.loss_fn is not None
    loss: torch.Tensor = case.loss_fn(case.model(*args), targets)
    return loss


def trained(case: Case, optimizer: Optimizer, steps: range, chosen: Any = None) -> Any:
    """Plain full-batch training of the case's own model; returns the optimizer."""
    named = [(n, p) for n, p in case.model.named_parameters() if p.requires_grad]
    chosen = chosen or optimizer(named)
    for step in steps:
        chosen.zero_grad()
        plain_loss(case, step).backward()
        chosen.step()
    return chosen


def assert_state(got: dict[str, torch.Tensor], want: nn.Module, tolerance: float) -> None:
    expected = want.state_dict()
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance, msg=name)


def test_a_skip_over_several_stages_is_a_direct_edge() -> None:
    graph = captured("a01_skip_long")
    blocks = [Part(f"blocks.{i}", 3) for i in range(5)]
    plan = manual_plan(graph, [*blocks, Part("merge blocks.5 head", 3)], batch_size=BATCH)
    assert {(edge.source, edge.target) for edge in plan.edges} == {
        *((i, i + 1) for i in range(5)),
        (0, 4),
    }
    # The skip's samples wait at the reader, which joins them to the fifth block's output.
    assert plan.stages[0].in_flight > plan.stages[4].in_flight


def test_tied_weights_on_two_stages_stay_equal_through_five_adam_steps() -> None:
    case, plain = load("a02_tied_embedding"), load("a02_tied_embedding")
    graph = captured(case.name)
    tied = next(item for item in graph.parameters if item.aliases)
    readers = [op.name for op in graph.ops if tied.name in op.parameters]
    assert len(readers) >= 2
    first, last = readers[0], readers[-1]
    names = [op.name for op in graph.ops]
    after = names[names.index(last) :]
    plan = manual_plan(graph, [Part(first, 3), Part(" ".join(after), 3)], batch_size=BATCH)
    pipe = run_pipe(case, plan, adam)
    for step in range(5):
        args, targets = rolled(case, step)
        pipe.step(args, targets=targets)
        held = [w.parameters[tied.name] for w in pipe.workers if tied.name in w.parameters]
        assert len(held) == 2
        assert torch.equal(held[0], held[1])
    trained(plain, adam, range(5))
    assert_state(pipe.state_dict(), plain.model, 2e-5)
    pipe.close()


def test_a_frozen_tower_has_no_backward_no_gradient_message_and_no_all_reduce() -> None:
    case, plain = load("a04_frozen_branch"), load("a04_frozen_branch")
    graph = captured(case.name)
    plan = manual_plan(
        graph,
        [Part("vision", 2, replicas=2), Part("adapter tok lm.0", 2), Part("lm.1 lm.2 head", 6)],
        batch_size=BATCH,
    )
    assert not plan.stages[0].has_backward
    assert not any(
        text.startswith("B") for line in plan.schedule.lines[:2] for text in line.split()
    )
    assert not any(edge.has_gradient for edge in plan.edges if edge.source == 0)
    frozen = {name for name, p in case.model.named_parameters() if not p.requires_grad}
    assert frozen
    assert not frozen & {name for group in plan.reduce_groups for name in group.parameters}
    pipe = run_pipe(case, plan)
    for step in range(2):
        args, targets = rolled(case, step)
        pipe.step(args, targets=targets)
    trained(plain, sgd, range(2))
    assert_state(pipe.state_dict(), plain.model, 1e-5)
    pipe.close()


@pytest.mark.parametrize("samples", [12, 10])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_replicas_with_unequal_shares_weigh_by_samples(replicas: int, samples: int) -> None:
    name = "a01_skip_long"
    graph = captured(name)
    case, plain = load(name), load(name)
    cut = some_cut(name, 3)
    plan = plan_of(graph, cut, [2, 2, 4], replicas=[replicas, 1, min(replicas, 2)])
    pipe = run_pipe(case, plan)
    part = case.args[0][:samples]
    got = pipe.step(part, targets=case.targets[:samples])
    assert plain.loss_fn is not None
    loss = plain.loss_fn(plain.model(part), case.targets[:samples])
    loss.backward()
    assert float(got) == pytest.approx(float(loss.detach()), abs=1e-6)
    for key, parameter in pipe.named_parameters():
        want = plain.model.get_parameter(key).grad
        torch.testing.assert_close(parameter.grad, want, rtol=1e-5, atol=1e-6)
    pipe.close()


@pytest.mark.parametrize("micro_batch", [12, 6, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_keep_their_scale_through_accumulation(reduction: str, micro_batch: int) -> None:
    name = "a01_skip_long"

    def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, labels, reduction=reduction)

    case, plain = load(name), load(name)
    graph = capture(case.model, case.args, targets=case.targets, loss_fn=loss_fn, name=name)
    cut = legal_cut(graph, 3, random.Random(0))
    results = []
    for replicas in (1, 2):
        if BATCH // micro_batch < replicas:
            continue
        plan = plan_of(graph, cut, [micro_batch] * 3, replicas=[1, replicas, 1])
        pipe = Pipeline(load(name).model, plan, loss_fn, sgd, graph=graph, transport="in_process")
        for step in range(3):
            args, targets = rolled(case, step)
            pipe.accumulate(args, targets=targets)
        pipe.update()
        results.append(pipe.state_dict())
        pipe.close()
    chosen = torch.optim.SGD(plain.model.parameters(), lr=0.1)
    for step in range(3):
        args, targets = rolled(plain, step)
        loss_fn(plain.model(*args), targets).backward()
    chosen.step()
    for state in results:
        assert_state(state, plain.model, 1e-5)


def test_a_change_of_length_between_accumulated_mini_batches_keeps_the_gradients() -> None:
    case, plain = load("a17_token_mean_loss"), load("a17_token_mean_loss")
    graph = captured(case.name)
    plan = plan_of(graph, some_cut(case.name, 3), [3] * 3)
    pipe = run_pipe(case, plan, variants="capture")
    assert plain.loss_fn is not None
    for length in (8, 5):
        inputs, targets = case.args[0][:10, :length], case.targets[:10, :length]
        got = pipe.accumulate(inputs, targets=targets)
        loss = plain.loss_fn(plain.model(inputs), targets)
        loss.backward()
        assert float(got) == pytest.approx(float(loss.detach()), abs=1e-6)
    pipe.update()
    torch.optim.SGD(plain.model.parameters(), lr=0.1).step()
    assert_state(pipe.state_dict(), plain.model, 1e-5)
    pipe.close()


def on_gloo(name: str, graph: ModelGraph, plan: Plan, steps: int) -> dict[str, torch.Tensor]:
    results = launch(_work, plan.world_size, (name, graph, plan, steps), method="fork", threads=1)
    state: dict[str, torch.Tensor] = results[0]
    return state


def _work(name: str, graph: ModelGraph, plan: Plan, steps: int) -> dict[str, torch.Tensor]:
    case = load(name)
    pipe = run_pipe(case, plan, graph=graph, transport="process_group", timeout=120)
    for step in range(steps):
        args, targets = rolled(case, step)
        pipe.step(args, targets=targets)
    state = pipe.state_dict(to=0)
    pipe.close()
    return state


@pytest.mark.long
@pytest.mark.parametrize("builder", ["kfkb", "gpipe", "list"])
def test_twenty_steps_on_four_processes_end_and_equal_eager(builder: str) -> None:
    name = "a01_skip_long"
    graph = captured(name)
    plan = plan_of(graph, some_cut(name, 4), [2] * 4, builder=builder)
    plain = load(name)
    trained(plain, sgd, range(20))
    assert_state(on_gloo(name, graph, plan, 20), plain.model, 1e-4)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [(0, 1, 0, 1), (1, 0, 1, 0), (0, 1, 1, 0)])
def test_traffic_both_ways_between_two_processes_ends(ranks: tuple[int, ...]) -> None:
    name = "a01_skip_unet"
    graph = captured(name)
    cut = some_cut(name, 4)
    parts = [Part(" ".join(ops), size, (rank,))
             for ops, size, rank in zip(cut, (1, 4, 2, 4), ranks, strict=True)]  # fmt: skip
    plan = manual_plan(graph, parts, batch_size=BATCH)
    plain = load(name)
    trained(plain, sgd, range(3))
    assert_state(on_gloo(name, graph, plan, 3), plain.model, 1e-4)


@pytest.mark.parametrize("name", ["a04_frozen_branch", "a13_batchnorm"])
def test_training_resumes_on_another_plan_and_in_plain_pytorch(name: str, tmp_path: Path) -> None:
    graph = captured(name)
    size = 4
    whole, first = load(name), load(name)
    before = run_pipe(first, plan_of(graph, some_cut(name, 3), [size] * 3), adam)
    reference = run_pipe(whole, plan_of(graph, some_cut(name, 1), [size]), adam)
    for step in range(3):
        args, targets = rolled(first, step)
        before.step(args, targets=targets)
    before.save(str(tmp_path), data={"step": 3})
    saved = before.state_dict()
    before.close()
    after = run_pipe(load(name), plan_of(graph, some_cut(name, 2), [size] * 2), adam)
    assert after.load(str(tmp_path)) == {"step": 3}
    for step in range(6):
        args, targets = rolled(first, step)
        loss = reference.step(args, targets=targets)
        if step >= 3:
            resumed = after.step(args, targets=targets)
            assert float(resumed) == pytest.approx(float(loss), abs=1e-5)
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(after.state_dict()[key], value, rtol=1e-4, atol=1e-5, msg=key)
    reference.close()
    after.close()
    plain = copy.deepcopy(whole.model)
    plain.load_state_dict(gp.load_state_dict(str(tmp_path)))
    for key, value in saved.items():
        torch.testing.assert_close(plain.state_dict()[key], value, rtol=0, atol=0, msg=key)
