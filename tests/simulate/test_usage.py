from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graphpipe.plan.plan import Plan
from graphpipe.simulate.timeline import Event, Timeline, Transfer
from graphpipe.simulate.usage import bubble, busiest, covered_ns, device_uses, recompute_ns
from tests.report import factory


def one_stage(*events: Event, iteration_ns: int = 100) -> tuple[Plan, Timeline]:
    plan, _ = factory.run((factory.stage("only", (0,), 1, 1, 10, recompute=True),), (), 1, 2)
    return plan, Timeline(world_size=2, iteration_ns=iteration_ns, events=events)


def event(kind: str, start_ns: int, end_ns: int) -> Event:
    stage = 0 if kind in ("F", "B") else -1
    return Event.model_validate(
        {"rank": 0, "kind": kind, "start_ns": start_ns, "end_ns": end_ns, "stage": stage}
    )


def test_the_time_of_a_device_is_divided_without_rest() -> None:
    plan, timeline = one_stage(
        event("F", 5, 15),
        event("B", 20, 50),
        event("all_reduce", 40, 70),
        event("optimizer", 80, 90),
    )
    use, _ = device_uses(plan, timeline)
    assert (use.forward_ns, use.backward_ns, use.recompute_ns) == (10, 20, 10)
    assert (use.all_reduce_ns, use.optimizer_ns) == (30, 10)
    assert (use.fill_ns, use.wait_ns, use.drain_ns) == (5, 15, 10)
    assert use.busy_ns == 70, "the all-reduce runs under the backward for 10 ns"
    assert use.busy_ns + use.idle_ns == timeline.iteration_ns


def test_a_device_without_a_stage_is_idle_and_not_part_of_the_bubble() -> None:
    plan, timeline = one_stage(event("F", 0, 10), event("B", 10, 40), iteration_ns=50)
    uses = device_uses(plan, timeline)
    assert uses[1].idle_ns == 50
    assert bubble(uses, 50) == 0.2


def test_the_bubble_of_nothing_is_nothing() -> None:
    assert bubble((), 0) == 0.0


def test_the_busiest_device_is_the_bottleneck() -> None:
    plan, timeline = factory.two_towers()
    uses = device_uses(plan, timeline)
    worst = busiest(uses)
    assert worst.busy_ns == max(use.busy_ns for use in uses)
    assert worst.stages == (0,)


def test_bytes_are_counted_at_both_ends() -> None:
    plan, timeline = one_stage()
    moves = tuple(
        Transfer(source=0, target=1, kind="F", edge=0, start_ns=0, end_ns=1, nbytes=size)
        for size in (5, 7)
    )
    sender, receiver = device_uses(plan, timeline.model_copy(update={"transfers": moves}))
    assert (sender.sent_bytes, sender.received_bytes) == (12, 0)
    assert (receiver.sent_bytes, receiver.received_bytes) == (0, 12)


def test_recomputation_takes_its_share_of_a_measured_backward() -> None:
    plan, _ = one_stage()
    assert recompute_ns(plan, event("B", 0, 60)) == 20
    assert recompute_ns(plan, event("F", 0, 60)) == 0


def test_without_recomputation_a_backward_is_whole() -> None:
    plan, _ = factory.chain(1, 1)
    assert recompute_ns(plan, event("B", 0, 60)) == 0


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda p: (p[0], sum(p))))


@given(spans)
def test_covered_time_equals_counting_every_nanosecond(intervals: list[tuple[int, int]]) -> None:
    counted = {t for start, end in intervals for t in range(start, end)}
    assert covered_ns(intervals) == len(counted)
