from __future__ import annotations

from graphpipe.plan.plan import Plan
from graphpipe.report.memory import memory_steps
from graphpipe.simulate.timeline import Event, Timeline
from tests.report import factory

MIB = 2**20
STATIC = 4 * factory.GIB
SAVED, WORKSPACE, AGAIN = 256 * MIB, 64 * MIB, 512 * MIB


def timeline_of(plan: Plan, *spans: tuple[str, int, int, int]) -> Timeline:
    events = tuple(
        Event.model_validate(
            {"rank": 0, "kind": kind, "stage": 0, "micro_batch": i, "start_ns": a, "end_ns": b}
        )
        for kind, i, a, b in spans
    )
    return Timeline(world_size=plan.world_size, iteration_ns=100, events=events)


def test_activations_live_from_forward_to_backward() -> None:
    plan, _ = factory.chain(1, 2)
    timeline = timeline_of(plan, ("F", 0, 0, 10), ("F", 1, 10, 20), ("B", 0, 20, 40))
    assert memory_steps(plan, timeline)[0] == (
        (0, STATIC + SAVED + WORKSPACE),
        (10, STATIC + 2 * SAVED + WORKSPACE),
        (40, STATIC + SAVED),
    )


def test_recomputation_holds_its_activations_during_the_backward() -> None:
    stages = (factory.stage("only", (0,), 1, 1, 10, recompute=True),)
    plan, _ = factory.run(stages, (), 1, 1)
    timeline = timeline_of(plan, ("F", 0, 0, 10), ("B", 0, 10, 40))
    assert max(level for _, level in memory_steps(plan, timeline)[0]) == (
        STATIC + SAVED + WORKSPACE + AGAIN
    )


def test_a_short_last_micro_batch_keeps_less() -> None:
    stages = (factory.stage("only", (0,), 4, 4, 10),)
    plan, _ = factory.run(stages, (), 6, 1)
    timeline = timeline_of(plan, ("F", 1, 0, 10))
    assert memory_steps(plan, timeline)[0][-1] == (10, STATIC + SAVED // 2)


def test_a_stage_without_a_backward_keeps_nothing() -> None:
    stages = (factory.stage("frozen", (0,), 1, 1, 10, has_backward=False),)
    plan, _ = factory.run(stages, (), 2, 1)
    steps = memory_steps(plan, timeline_of(plan, ("F", 0, 0, 10)))[0]
    assert steps == ((0, STATIC + WORKSPACE), (10, STATIC))


def test_an_idle_device_uses_nothing() -> None:
    plan, timeline = factory.two_towers()
    assert memory_steps(plan, timeline)[6] == ((0, 0),)
