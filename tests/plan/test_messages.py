"""Messages: every sample passes exactly once, whatever the sizes, replicas and rest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graphpipe.plan.messages import credits, messages, overlaps
from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec

sizes = st.integers(1, 9)


def two_stages(
    samples: int,
    b: tuple[int, int],
    r: tuple[int, int],
    edge: EdgeSpec,
    *,
    shared: bool = False,
    backward: tuple[bool, bool] = (True, True),
    in_flight: int = 8,
) -> PipelineProblem:
    first = tuple(range(r[0]))
    second = tuple(range(r[1])) if shared else tuple(range(r[0], r[0] + r[1]))
    return PipelineProblem(
        (
            StageSpec(b[0], r[0], 1, in_flight, first, 1, 2, backward[0]),
            StageSpec(b[1], r[1], 1, in_flight, second, 1, 2, backward[1]),
        ),
        (edge,),
        samples,
        r[0] + r[1],
    )


@given(samples=st.integers(0, 40), source=sizes, target=sizes)
def test_overlaps_tile_the_samples(samples: int, source: int, target: int) -> None:
    found = overlaps(samples, source, target)
    covered = [x for item in found for x in range(item.start, item.stop)]
    assert covered == list(range(samples))
    for item in found:
        assert item.start < item.stop
        assert item.start // source == (item.stop - 1) // source == item.source
        assert item.start // target == (item.stop - 1) // target == item.target
    assert [item.target for item in found if item.first] == list(range(-(-samples // target)))


@given(
    samples=st.integers(1, 40),
    b=st.tuples(sizes, sizes),
    r=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    shared=st.booleans(),
    first_sample=st.integers(0, 100),
)
def test_each_sample_crosses_once_each_way(
    samples: int, b: tuple[int, int], r: tuple[int, int], shared: bool, first_sample: int
) -> None:
    edge = EdgeSpec(0, 1, 10.0, 3.0, 20.0, 5.0)
    problem = two_stages(samples, b, r, edge, shared=shared)
    found = messages(problem, first_sample)
    assert len(set(found)) == len(found)
    for kind, per_sample, fixed in (("F", 10, 3), ("B", 20, 5)):
        crossed: set[int] = set()
        for m in found:
            if m.kind != kind:
                continue
            assert m.source != m.target
            span = set(range(m.start, m.stop))
            assert not span & crossed
            crossed |= span
            for stage, index, rank in (
                (m.source_stage, m.source_micro_batch, m.source),
                (m.target_stage, m.target_micro_batch, m.target),
            ):
                size = problem.stages[stage].micro_batch
                assert first_sample + index * size <= m.start
                assert m.stop <= first_sample + min((index + 1) * size, samples)
                assert problem.stages[stage].devices[index % problem.stages[stage].replicas] == rank
            assert m.nbytes == per_sample * len(span) + fixed * m.fixed
        # What did not cross has both ends on one device.
        for x in set(range(first_sample, first_sample + samples)) - crossed:
            ends = {
                s.devices[(x - first_sample) // s.micro_batch % s.replicas] for s in problem.stages
            }
            assert len(ends) == 1


@given(samples=st.integers(1, 40), b=st.tuples(sizes, sizes))
def test_tensors_without_a_batch_dimension_cross_once_per_consumer(
    samples: int, b: tuple[int, int]
) -> None:
    edge = EdgeSpec(0, 1, forward_fixed=7.0, backward_fixed=9.0, batched=False,
                    gradient_batched=False)  # fmt: skip
    found = messages(two_stages(samples, b, (1, 1), edge))
    consumers = list(range(-(-samples // b[1])))
    assert [m.target_micro_batch for m in found if m.kind == "F"] == consumers
    assert [m.source_micro_batch for m in found if m.kind == "B"] == consumers
    assert all(m.fixed for m in found)
    assert {m.nbytes for m in found if m.kind == "F"} == {7}
    assert {m.nbytes for m in found if m.kind == "B"} == {9}


def test_no_gradient_message_for_a_frozen_producer() -> None:
    problem = two_stages(8, (2, 2), (1, 1), EdgeSpec(0, 1), backward=(False, True), in_flight=4)
    found = messages(problem)
    assert [m.kind for m in found] == ["F"] * 4 + ["C"] * 2
    # Forward 2 of the producer would be the third ahead: it waits for consumer 0.
    assert [(c.consumer, c.producer) for c in credits(problem)] == [(0, 2), (1, 3)]
    assert [(m.source_micro_batch, m.target_micro_batch, m.nbytes) for m in found[4:]] == [
        (0, 2, 0),
        (1, 3, 0),
    ]


def test_edges_with_gradient_have_no_credits() -> None:
    assert credits(two_stages(8, (2, 2), (1, 1), EdgeSpec(0, 1), in_flight=2)) == []


@given(samples=st.integers(1, 60), b=st.tuples(sizes, sizes), ahead=st.integers(1, 60))
def test_credits_hold_the_producer_within_the_bound(
    samples: int, b: tuple[int, int], ahead: int
) -> None:
    problem = two_stages(
        samples, b, (1, 1), EdgeSpec(0, 1, has_gradient=False), backward=(False, True),
        in_flight=ahead,
    )  # fmt: skip
    seen = [c.consumer for c in credits(problem)]
    assert seen == sorted(set(seen))
    for i in range(-(-samples // b[0])):
        consumed = {c.consumer for c in credits(problem) if c.producer <= i}
        stop = min((i + 1) * b[0], samples)
        unconsumed = stop - len(consumed) * b[1]
        assert unconsumed < min(ahead, samples) + b[1]
