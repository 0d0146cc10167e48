"""Predictions kept in plans."""

from __future__ import annotations

import pytest

from graphpipe.plan.plan import Plan, ReduceGroup
from graphpipe.simulate.predict import prediction_of, with_prediction
from graphpipe.simulate.simulator import simulate
from tests.plan.plans import plan_of
from tests.plan.random_problems import random_problem
from tests.plan.test_actions import cluster_for
from tests.simulate.test_simulator import chain_plan


def test_the_figures_are_those_of_the_timeline() -> None:
    plan = chain_plan(optimizer_ns=(5, 9))
    timeline = simulate(plan, network="channel")
    found = prediction_of(plan, timeline, lower_bound_ns=77)
    assert found.iteration_ns == timeline.iteration_ns == 114
    assert found.bottleneck_ns == 69
    assert found.bubble == timeline.bubble
    assert (found.depth, found.communication_ns, found.all_reduce_ns) == (2, 24, 0)
    assert (found.optimizer_ns, found.lower_bound_ns) == (9, 77)
    assert found.peak_memory == timeline.peak_memory


def test_a_plan_with_its_prediction_survives_json() -> None:
    plan = with_prediction(chain_plan(), network="channel")
    assert plan.prediction is not None
    assert plan.prediction.iteration_ns == 109
    assert Plan.from_json(plan.to_json()) == plan
    assert with_prediction(chain_plan()).prediction == plan.prediction


@pytest.mark.parametrize("network", ["channel", "shared"])
def test_both_ways_to_the_figures_agree(network: str) -> None:
    for seed in range(40):
        problem = random_problem(seed)
        world = problem.world_size
        groups = [ReduceGroup(ranks=(0, world), parameters=("p",), nbytes=70)]
        plan = plan_of(
            problem,
            cluster_for(2 * world, seed),
            copies=2,
            reduce_groups=groups,
            optimizer_ns=range(2 * world),
        )
        timeline = simulate(plan, network=network)  # type: ignore[arg-type]
        made = with_prediction(plan, network=network).prediction  # type: ignore[arg-type]
        assert made == prediction_of(plan, timeline)
