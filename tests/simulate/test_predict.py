"""Predictions kept in plans."""

from __future__ import annotations

from graphpipe.plan.plan import Plan
from graphpipe.simulate.predict import prediction_of, with_prediction
from graphpipe.simulate.simulator import simulate
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
