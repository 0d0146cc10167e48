from __future__ import annotations

from graphpipe.simulate.words import describe, describe_measured
from graphpipe.units import format_bytes, format_ns, format_percent
from tests.report import factory


def test_everything_that_matters_is_said() -> None:
    plan, timeline = factory.two_towers()
    text = "\n".join(describe(plan, timeline))
    took, busy = format_ns(timeline.iteration_ns), max(timeline.busy_ns)
    rate = round(32 / timeline.iteration_ns * 1e9)
    assert f"One iteration takes {took} for 32 samples: {rate:,} samples a second." in text
    share = format_percent(busy / timeline.iteration_ns)
    assert f"bottleneck is device 0, which works for {format_ns(busy)} of it ({share})" in text
    assert "on stage 0 (image.0): forward " in text
    assert f"The bubble is {format_percent(timeline.bubble)}" in text
    assert f"in {len(timeline.transfers)} messages" in text
    assert f"device 0: {format_bytes(timeline.peak_memory[0])} of 16 GiB (" in text
    assert "above that bound." in text
    assert "1 of 7 devices stay idle (6)" in text


def test_parts_of_the_bubble_add_up() -> None:
    _, _, bubble, *_ = describe(*factory.two_towers())
    whole, *parts = [float(word) for word in bubble.split() if word.replace(".", "").isdigit()]
    assert abs(whole - sum(parts)) < 0.2


def test_what_the_plan_does_not_know_is_not_said() -> None:
    plan, timeline = factory.chain(2, 4)
    plan = plan.model_copy(update={"prediction": None})
    timeline = timeline.model_copy(update={"peak_memory": (), "transfers": ()})
    text = "\n".join(describe(plan, timeline))
    for word in ("bound", "Memory", "exchange", "stay idle"):
        assert word not in text


def test_several_stages_of_the_bottleneck_are_all_named() -> None:
    stages = (
        factory.stage("head", (0,), 1, 1, 100),
        factory.stage("middle", (0,), 1, 1, 100),
        factory.stage("tail", (0,), 1, 1, 100),
    )
    edges = (factory.edge(0, 1), factory.edge(1, 2))
    plan, timeline = factory.run(stages, edges, 4, 1)
    assert "on stages 0 (head), 1 (middle) and 2 (tail): " in describe(plan, timeline)[1]


def test_a_measurement_is_compared_with_the_prediction() -> None:
    plan, timeline = factory.two_towers()
    measured = factory.measured_of(timeline, slower=1.25)
    error, bottleneck, bubble = describe_measured(plan, timeline, measured)
    assert f"measured {format_ns(measured.iteration_ns)}: the prediction is 20.0 % below" in error
    assert bottleneck.startswith("The bottleneck is device 0")
    assert bubble.startswith("The bubble is 4")
