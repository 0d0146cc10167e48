"""Copies that are alike are treated once, with the same result for all."""

from __future__ import annotations

from graphpipe.cost.cluster import Network
from graphpipe.plan.actions import build_actions
from graphpipe.plan.copies import alike_copies, ranks_of_copy
from graphpipe.plan.memory import memory_steps, peak_memory
from graphpipe.plan.plan import Plan
from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec
from graphpipe.plan.schedule import Schedule
from graphpipe.plan.stage import StageMemory
from tests.plan.plans import cluster_of, plan_of
from tests.plan.random_problems import random_problem
from tests.plan.test_actions import cluster_for

CHAIN = PipelineProblem(
    (StageSpec(1, 1, 1, 2, (1,), 10, 20), StageSpec(1, 1, 1, 1, (0,), 10, 20)),
    (EdgeSpec(0, 1, 8.0, 0.0, 5.0),),
    3,
    2,
)


def test_ranks_follow_the_stages() -> None:
    plan = plan_of(CHAIN, copies=2)
    assert [ranks_of_copy(plan, copy) for copy in (0, 1)] == [[1, 0], [3, 2]]


def test_samples_links_and_lists_tell_copies_apart() -> None:
    plan = plan_of(CHAIN, copies=3)
    assert alike_copies(plan) == [[0, 1, 2]]
    assert alike_copies(Plan(**{**dict(plan), "batch_size": 8})) == [[0], [1, 2]]
    # Nodes of four: copy 0 and 1 fill the first; with three a node, copy 1 spans two.
    net = Network(intra_node_bandwidth=1e9, inter_node_bandwidth=1e8)
    assert alike_copies(plan_of(CHAIN, cluster_of(6, net, per_node=4), copies=3)) == [[0, 1, 2]]
    assert alike_copies(plan_of(CHAIN, cluster_of(6, net, per_node=3), copies=3)) == [[0, 2], [1]]
    lines = list(plan.schedule.lines)
    lines[3] = "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2"
    changed = Plan(**{**dict(plan), "schedule": Schedule(lines=tuple(lines))})
    assert alike_copies(changed) == [[0, 2], [1]]


def test_peaks_are_those_of_walking_through_every_copy() -> None:
    for seed in range(25):
        problem = random_problem(seed)
        plan = plan_of(
            problem,
            cluster_for(3 * problem.world_size, seed),
            copies=3,
            memory=StageMemory(parameters=9, saved_per_micro_batch=5, workspace=3),
        )
        static = tuple(range(3 * problem.world_size))
        plan = Plan(**{**dict(plan), "static_memory": static})
        steps = memory_steps(plan, build_actions(plan))
        assert peak_memory(plan) == tuple(max(s.held for s in line) for line in steps)
