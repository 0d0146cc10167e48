"""The demonstration: what it promises about plan, equality and learning."""

from __future__ import annotations

import pytest

from graphpipe.plan.plan import Plan
from graphpipe.programs.demo import Prepared, Settings, _rate, prepare, run

SHORT = Settings(epochs=1, batch_size=96)


class Silent:
    """A listener that does nothing; it is called in the worker of rank 0."""

    def equality(self, found: object) -> None: ...
    def step(self, done: int, total: int, loss: float) -> None: ...
    def epoch(self, epoch: int, loss: float, accuracy: float | None) -> None: ...


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare(SHORT)


def ancestors(plan: Plan, stage: int) -> set[int]:
    found: set[int] = set()
    todo = [stage]
    while todo:
        for edge in plan.in_edges[todo.pop()]:
            if edge.source not in found:
                found.add(edge.source)
                todo.append(edge.source)
    return found


def towers_of(plan: Plan, prepared: Prepared) -> dict[str, set[int]]:
    """The stages that hold ops of each top-level module."""
    found: dict[str, set[int]] = {}
    for i, stage in enumerate(plan.stages):
        for name in stage.ops:
            top = prepared.graph.op_by_name[name].module.split(".")[0]
            found.setdefault(top, set()).add(i)
    return found


def test_towers_are_parallel_stages_with_small_micro_batches(prepared: Prepared) -> None:
    plan = prepared.plan
    by_module = towers_of(plan, prepared)
    image, text = by_module["image"], by_module["text"]
    assert not image & text
    for stage in image:
        assert not ancestors(plan, stage) & text
    for stage in text:
        assert not ancestors(plan, stage) & image
    assert {plan.stages[stage].micro_batch for stage in image | text} == {24}
    assert {rank for stage in plan.stages for rank in stage.devices} == {0, 1, 2, 3}


def test_loss_runs_with_the_whole_mini_batch(prepared: Prepared) -> None:
    for stage in prepared.plan.stages:
        if any(prepared.graph.op_by_name[name].coupled for name in stage.ops):
            assert stage.micro_batch == SHORT.batch_size
            assert stage.replicas == 1


def test_pipeline_equals_one_process_and_learns(prepared: Prepared) -> None:
    outcome = run(prepared, SHORT, Silent())
    assert outcome.equality.steps == 5
    assert outcome.equality.loss <= 1e-6
    assert outcome.equality.parameters <= 1e-6
    assert len(outcome.losses) == 14
    assert outcome.losses[-1] < outcome.losses[0]
    ran = {
        (e.rank, e.kind, e.stage, e.micro_batch) for e in outcome.measured.events if e.stage >= 0
    }
    planned = {
        (rank, task.kind, task.stage, task.micro_batch)
        for rank, line in enumerate(prepared.plan.schedule.tasks)
        for task in line
    }
    assert ran == planned


@pytest.mark.long
@pytest.mark.timeout(900)
def test_held_out_digits_are_told_apart(prepared: Prepared) -> None:
    settings = Settings()
    outcome = run(prepare(settings), settings, Silent())
    assert outcome.accuracies[-1][1] > 0.9


@pytest.mark.parametrize("total", [1, 2, 5, 110])
def test_learning_rate_rises_and_falls(total: int) -> None:
    rates = [_rate(step, total) for step in range(total)]
    assert all(0 < rate <= 1 for rate in rates)
    assert max(rates) == 1
    top = rates.index(1)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
