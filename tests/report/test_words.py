from __future__ import annotations

from graphpipe.report.words import describe, describe_measured
from tests.report import factory


def test_everything_that_matters_is_said() -> None:
    plan, timeline = factory.two_towers()
    text = "\n".join(describe(plan, timeline))
    assert "takes 89.7 µs for 32 samples: 356,745 samples a second." in text
    assert "The bottleneck is device 0, which works for 58.1 µs of it (64.8 %)" in text
    assert "on stage 0 (image.0)." in text
    assert "The bubble is 47.9 %" in text
    assert f"in {len(timeline.transfers)} messages." in text
    assert "device 0: 5 GiB of 16 GiB (31.2 %)" in text
    assert "above that bound." in text
    assert "No stage runs on device 6." in text


def test_parts_of_the_bubble_add_up() -> None:
    _, _, bubble, *_ = describe(*factory.two_towers())
    whole, *parts = [float(word) for word in bubble.split() if word.replace(".", "").isdigit()]
    assert abs(whole - sum(parts)) < 0.2


def test_what_the_plan_does_not_know_is_not_said() -> None:
    plan, timeline = factory.chain(2, 4)
    plan = plan.model_copy(update={"prediction": None})
    timeline = timeline.model_copy(update={"peak_memory": (), "transfers": ()})
    text = "\n".join(describe(plan, timeline))
    for word in ("bound", "Memory", "exchange", "No stage"):
        assert word not in text


def test_several_stages_of_the_bottleneck_are_all_named() -> None:
    stages = (
        factory.stage("head", (0,), 1, 1, 100),
        factory.stage("tail", (0,), 1, 1, 100),
    )
    plan, timeline = factory.run(stages, (factory.edge(0, 1),), 4, 1)
    assert "on stages 0 (head) and 1 (tail)." in describe(plan, timeline)[1]


def test_a_measurement_is_compared_with_the_prediction() -> None:
    plan, timeline = factory.two_towers()
    measured = factory.measured_of(timeline, slower=1.25)
    error, bottleneck, bubble = describe_measured(plan, timeline, measured)
    assert "Predicted 89.7 µs, measured 112.1 µs: the prediction is 20.0 % below" in error
    assert bottleneck.startswith("The bottleneck is device 0")
    assert bubble.startswith("The bubble is 4")
