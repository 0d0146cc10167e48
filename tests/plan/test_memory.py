"""Static memory of a rank: what is held when, by the order of its actions."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.plan.actions import build_actions
from graphpipe.plan.memory import memory_steps, peak_memory
from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec
from graphpipe.plan.stage import StageMemory
from graphpipe.plan.task_graph import lane_bound
from tests.plan.plans import plan_of
from tests.plan.random_problems import random_problem

MEMORY = StageMemory(parameters=1000, saved_per_micro_batch=100, recompute=30, workspace=7)


def chain(samples: int, *, shared: bool = False) -> PipelineProblem:
    second = 0 if shared else 1
    return PipelineProblem(
        (StageSpec(1, 1, 1, 2, (0,), 10, 20), StageSpec(1, 1, 1, 1, (second,), 10, 20)),
        (EdgeSpec(0, 1, 8.0, 0.0, 5.0),),
        samples,
        1 if shared else 2,
    )


def test_one_stage_holds_saved_activations_and_the_workspace_of_one_task() -> None:
    plan = plan_of(PipelineProblem((StageSpec(1, 1, 1, 3, (0,), 1, 2),), (), 5, 1), memory=MEMORY)
    assert peak_memory(plan) == (1000 + 100 * 3 + 37,)
    deep = plan_of(
        PipelineProblem((StageSpec(1, 1, 1, 3, (0,), 1, 2),), (), 5, 1),
        memory=MEMORY,
        builder="gpipe",
    )
    assert peak_memory(deep) == (1000 + 100 * 5 + 37,)


def test_buffers_that_wait_and_gradients_under_way_are_held() -> None:
    plan = plan_of(chain(3), memory=MEMORY)
    lists = build_actions(plan, lookahead=0)
    first, second = memory_steps(plan, lists)
    # Rank 0 holds two micro-batches, the gradient that arrived, and works.
    assert max(s.held for s in first) == 1000 + 200 + 5 + 37
    # Rank 1: the backward of the first micro-batch while the next one's input waits; later a
    # gradient that is still being sent instead, which is smaller.
    assert max(s.held for s in second) == 1000 + 100 + 37 + 8
    assert 1000 + 100 + 37 + 5 in [s.held for s in second]
    assert first[-1].held == second[-1].held == 1000


def test_posting_receives_earlier_costs_what_it_holds() -> None:
    plan = plan_of(chain(6), memory=StageMemory())
    held = [
        max(step.held for step in memory_steps(plan, build_actions(plan, lookahead=ahead))[1])
        for ahead in (0, 1, 3)
    ]
    assert held[0] < held[2]
    assert held[1] == peak_memory(plan)[1]


def test_a_tensor_between_stages_of_one_rank_waits_there() -> None:
    plan = plan_of(chain(1, shared=True), memory=StageMemory())
    lists = build_actions(plan)
    assert [step.held for step in memory_steps(plan, lists)[0]] == [0, 8, 0, 5, 0]


def test_short_micro_batches_hold_their_share() -> None:
    problem = PipelineProblem((StageSpec(4, 1, 1, 4, (0,), 4, 8),), (), 2, 1)
    plan = plan_of(problem, memory=MEMORY)
    assert peak_memory(plan) == (1000 + 50 + 19,)


def test_idle_ranks_hold_nothing() -> None:
    problem = PipelineProblem((StageSpec(1, 1, 1, 1, (1,), 1, 2),), (), 2, 3)
    plan = plan_of(problem, memory=MEMORY)
    assert peak_memory(plan) == (0, 1137, 0)


@given(seed=st.integers(0, 10**6), lookahead=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_everything_is_given_back_and_bounds_hold(seed: int, lookahead: int) -> None:
    plan = plan_of(random_problem(seed), memory=MEMORY)
    lists = build_actions(plan, lookahead=lookahead)
    for rank, steps in enumerate(memory_steps(plan, lists)):
        static = plan.static_bytes(rank)
        assert steps[0].held == steps[-1].held == static
        assert min(step.held for step in steps) >= static
        saved = sum(
            100 * lane_bound(s.in_flight, s.replicas, s.micro_batch)
            for s in (plan.stages[number] for number in plan.stages_of_device[rank])
            if s.has_backward
        )
        buffers = sum(
            t.bytes_per_sample + t.fixed_bytes + t.gradient_bytes_per_sample
            + t.gradient_fixed_bytes
            for e in plan.edges for t in e.tensors
        ) * 31 * 4  # fmt: skip
        assert max(step.held for step in steps) <= static + saved + 37 + buffers
