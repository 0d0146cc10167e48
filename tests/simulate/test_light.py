"""Simulation without a plan."""

from __future__ import annotations

import pytest

from graphpipe.cost.cluster import Network
from graphpipe.plan.builders import build_schedule
from graphpipe.plan.plan import ReduceGroup
from graphpipe.simulate.light import simulate_problem
from graphpipe.simulate.simulator import simulate
from tests.plan.plans import cluster_of, plan_of
from tests.plan.random_problems import random_problem
from tests.plan.test_actions import cluster_for

NET = Network(intra_node_bandwidth=1e9, intra_node_latency=5e-9)


@pytest.mark.parametrize("network", ["channel", "shared"])
def test_it_agrees_with_the_simulation_of_the_plan(network: str) -> None:
    for seed in range(25):
        problem = random_problem(seed)
        world = problem.world_size
        cluster = cluster_for(world, seed)
        groups = [((0, world - 1), 70)] if world > 1 else []
        optimizer = [seed % 5 + rank for rank in range(world)]
        plan = plan_of(
            problem,
            cluster,
            reduce_groups=[
                ReduceGroup(ranks=ranks, parameters=("p",), nbytes=nbytes)
                for ranks, nbytes in groups
            ],
            optimizer_ns=optimizer,
        )
        built = build_schedule(problem, raise_bounds=True)
        for graph in (None, built.graph):
            light = simulate_problem(
                built.problem,
                built.lines,
                cluster,
                network=network,  # type: ignore[arg-type]
                graph=graph,
                groups=groups,
                optimizer_ns=optimizer,
            )
            assert light.iteration_ns == simulate(plan, network=network).iteration_ns  # type: ignore[arg-type]


def test_free_messages_take_no_time() -> None:
    problem = random_problem(3)
    built = build_schedule(problem, raise_bounds=True)
    cluster = cluster_of(problem.world_size, NET)
    free = simulate_problem(built.problem, built.lines, cluster, network="free")
    assert free.iteration_ns == built.makespan_ns
    assert free.run.end == built.end
    slow = simulate_problem(built.problem, built.lines, cluster, record=True)
    assert slow.iteration_ns >= free.iteration_ns
    assert not free.run.sent
