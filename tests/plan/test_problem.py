"""Plans as problems."""

from __future__ import annotations

import pytest

from graphpipe.errors import PlanError
from graphpipe.plan.plan import Plan
from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec, edge_spec, problem_of
from graphpipe.plan.stage import EdgeTensor, StageEdge
from tests.plan.plans import plan_of
from tests.plan.random_problems import random_problem


def test_a_plan_gives_its_problem_back() -> None:
    for seed in range(30):
        problem = random_problem(seed, sizes=(1, 2, 4))
        plan = plan_of(problem)
        found, owned = problem_of(plan)
        assert (owned.start, owned.stop) == (0, problem.samples)
        assert (found.samples, found.world_size) == (problem.samples, problem.world_size)
        for got, want in zip(found.stages, problem.stages, strict=True):
            assert got._replace(in_flight=0) == want._replace(in_flight=0)


def test_copies_own_ranges_and_ranks() -> None:
    problem = PipelineProblem((StageSpec(1, 2, 1, 2, (0, 1), 1, 2),), (), 3, 2)
    plan = plan_of(problem, copies=2)
    second, owned = problem_of(plan, 1)
    assert second.stages[0].devices == (2, 3)
    assert (owned.start, owned.stop) == (3, 6)
    short, owned = problem_of(plan, 1, batch_size=5)
    assert (short.samples, owned.start, owned.stop) == (3, 2, 5)


def test_evaluation_has_no_backward() -> None:
    problem = PipelineProblem((StageSpec(1, 1, 1, 2, (0,), 1, 2),), (), 3, 1)
    (stage,) = problem_of(plan_of(problem), training=False)[0].stages
    assert (stage.has_backward, stage.backward_ns) == (False, 0)


def test_the_slowest_device_sets_the_time_and_a_missing_kind_is_named() -> None:
    plan = plan_of(PipelineProblem((StageSpec(1, 1, 1, 2, (0,), 1, 2),), (), 3, 1))
    stage = plan.stages[0]
    other = type(stage)(**{**dict(stage), "times": {"fast": stage.times["toy"]}})
    with pytest.raises(PlanError, match=r"'s0' has no times.*'toy'.*got fast"):
        problem_of(Plan(**{**dict(plan), "stages": (other,)}))


def test_light_form_of_an_edge() -> None:
    batched = EdgeTensor(name="x", bytes_per_sample=4, gradient_bytes_per_sample=8)
    mask = EdgeTensor(name="m", bytes_per_sample=1, has_gradient=False)
    table = EdgeTensor(name="t", rows_per_sample=None, fixed_bytes=9, gradient_fixed_bytes=3)
    assert edge_spec(StageEdge(source=0, target=1, tensors=(batched, mask, table))) == EdgeSpec(
        0, 1, 5, 9, 8, 3
    )
    assert edge_spec(StageEdge(source=0, target=1, tensors=(mask, table))) == EdgeSpec(
        0, 1, 1, 9, 0, 3, gradient_batched=False
    )
    assert edge_spec(StageEdge(source=0, target=1, tensors=(mask,))) == EdgeSpec(
        0, 1, 1, 0, 0, 0, has_gradient=False, gradient_batched=False
    )
    assert not edge_spec(StageEdge(source=0, target=1, tensors=(table,))).batched
