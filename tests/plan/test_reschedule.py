"""Schedules for other mini-batches and for evaluation."""

from __future__ import annotations

import pytest

from graphpipe.plan.actions import build_actions
from graphpipe.plan.builders import list_schedule
from graphpipe.plan.checks import check_actions
from graphpipe.plan.plan import Plan
from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec
from graphpipe.plan.reschedule import schedule_for
from graphpipe.plan.schedule import Schedule
from tests.plan.plans import plan_of
from tests.plan.random_problems import random_problem

CHAIN = PipelineProblem(
    (StageSpec(2, 1, 1, 4, (0,), 2, 4), StageSpec(2, 1, 1, 2, (1,), 2, 4)),
    (EdgeSpec(0, 1, 1.0, 0.0, 1.0),),
    8,
    2,
)


def test_the_plans_own_schedule_where_it_fits() -> None:
    plan = plan_of(CHAIN)
    assert schedule_for(plan) is plan.schedule
    assert schedule_for(plan, 8) is plan.schedule


def test_a_short_batch_ends_with_a_short_micro_batch() -> None:
    schedule = schedule_for(plan_of(CHAIN), 3)
    assert schedule.lines == ("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1")
    assert schedule.builder == "kfkb"


def test_evaluation_runs_forwards_only() -> None:
    schedule = schedule_for(plan_of(CHAIN), training=False)
    assert schedule.lines == ("F0.0 F0.1 F0.2 F0.3", "F1.0 F1.1 F1.2 F1.3")


def test_a_copy_without_samples_gets_empty_lists() -> None:
    schedule = schedule_for(plan_of(CHAIN, copies=2), 1)
    assert schedule.lines == ("", "", "F0.0 B0.0", "F1.0 B1.0")


def test_list_schedules_are_built_alike() -> None:
    shared = PipelineProblem(
        tuple(s._replace(devices=(0,)) for s in CHAIN.stages), CHAIN.edges, 8, 1
    )
    plan = plan_of(shared)
    schedule = Schedule(
        lines=plan.schedule.lines, builder="list", priority="critical_path", lead=(0, 2)
    )
    other = schedule_for(Plan(**{**dict(plan), "schedule": schedule}), 6)
    smaller = PipelineProblem(shared.stages, shared.edges, 6, 1)
    built = list_schedule(smaller, priority="critical_path", lead=(0, 2))
    assert other == Schedule.of(
        built.graph.tasks(built.lines), "list", priority="critical_path", lead=(0, 2)
    )


@pytest.mark.parametrize("training", [True, False])
def test_every_size_of_every_plan_runs(training: bool) -> None:
    for seed in range(25):
        plan = plan_of(random_problem(seed), copies=1 + seed % 2)
        for batch_size in (1, 2, 7, plan.batch_size, plan.batch_size + 5):
            for ordering in ("global", "channel"):
                lists = build_actions(plan, batch_size, training=training, ordering=ordering)
                check_actions(lists, ordering)
                runs = [a for line in lists.lines for a in line if a.kind == "run"]
                assert all(a.task.kind == "F" for a in runs) or training
                assert runs
