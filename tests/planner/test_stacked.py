"""Candidates with shared devices in numbers: bounds, memory, order."""

from __future__ import annotations

import pytest

from graphpipe.plan.assemble import assemble
from graphpipe.plan.in_flight import in_flight_bounds
from graphpipe.plan.problem import problem_of
from graphpipe.plan.reschedule import schedule_for
from graphpipe.plan.task_graph import TaskGraph
from graphpipe.plan.validate import problems_of
from graphpipe.planner.colocate import Ground, Shape
from graphpipe.planner.shared_search import scheduled
from graphpipe.planner.space import Space
from graphpipe.planner.stacked import Hosted, Hosting, Stacked, checked
from graphpipe.simulate.predict import with_prediction
from tests.planner.synthetic import cluster_of, towers, units_of
from tests.planner.test_colocate import ground


def chain(devices: int, batch: int = 16) -> Space:
    units = units_of(towers(1, 4, 4))
    return Space(units, cluster_of(devices), batch, (2.0**40,) * devices, (0,) * len(units))


def test_one_stage_a_device_has_the_bounds_of_the_formula() -> None:
    space = chain(4)
    stages = tuple(Hosted((2 * i, 2 * i + 1), (i,), 2) for i in range(4))
    hosting = Hosting(space, Stacked(1, 4, stages, depth_share=0.0))
    formula = in_flight_bounds([2] * 4, [1] * 4, [(0, 1), (1, 2), (2, 3)], 16)
    assert hosting.bounds == (formula.block, formula.in_flight)


def test_stages_that_share_a_device_add_their_share() -> None:
    space = chain(2)
    stages = tuple(Hosted((2 * i, 2 * i + 1), (i % 2,), 2) for i in range(4))
    low = Hosting(space, Stacked(1, 2, stages, depth_share=0.0)).bounds[1]
    high = Hosting(space, Stacked(1, 2, stages, depth_share=1.0)).bounds[1]
    assert high == (8, 6, 4, 2)
    assert low[0] < high[0]
    assert all(a <= b for a, b in zip(low, high, strict=True))
    assert min(low) >= 2


def test_the_in_flight_samples_of_a_branch_do_not_grow_with_the_mini_batch() -> None:
    """The encoder's activations stay constant, however many micro-batches there are."""
    held = []
    for batch in (64, 256):
        made = ground(batch=batch, branches=1)
        shape = Shape("everywhere", 1, 4, False, 2, 1, branch_batch=2, fixed_order=True)
        hosting = made.hosting(shape)
        assert hosting is not None
        result = scheduled(hosting, 1)
        assert result is not None
        timed, graph = result
        held.append(hosting.kept_bounds(graph, timed.lines)[0])
    assert held[0] == held[1]


@pytest.mark.parametrize("layout", ["everywhere", "few", "spread", "first", "apart", "chain"])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_schedule_is_complete_within_bounds_and_a_valid_plan(layout: str, copies: int) -> None:
    made = ground(devices=4 * copies, batch=16 * copies, branches=1)
    for turns, fixed in ((1, True), (2, False), (2, True)):
        shape = Shape(
            layout, copies, 4, False, 2, turns, helpers=1,
            branch_batch=2 if layout == "chain" else 4,
            fixed_order=fixed,
        )  # fmt: skip
        hosting = made.hosting(shape)
        assert hosting is not None
        result = scheduled(hosting, 1)
        assert result is not None
        timed, graph = result
        assert sorted(t for line in timed.lines for t in line) == list(range(graph.count))
        kept = hosting.kept_bounds(graph, timed.lines)
        assert all(w <= bound for w, bound in zip(kept, hosting.bounds[1], strict=True))
        specs = [
            s._replace(in_flight=w) for s, w in zip(hosting.problem().stages, kept, strict=True)
        ]
        units = made.space.units
        plan = assemble(
            units.graph,
            units.costs,
            made.space.cluster,
            hosting.choices(specs),
            batch_size=made.space.batch_size,
            copies=copies,
            lines=graph.tasks(timed.lines),
        )
        plan = with_prediction(plan, network="channel")
        assert list(problems_of(plan, units.graph)) == []
        assert plan.prediction is not None
        # What the schedule is thought to take is what the simulator says, up to the reductions,
        # which the schedule does not make wait for one another.
        assert plan.prediction.iteration_ns >= 0.999 * (timed.finish_ns - max(hosting.after_ns))
        assert plan.prediction.iteration_ns <= 1.02 * timed.finish_ns
        # Memory: all but messages that arrive early.
        peak = hosting.peak_bytes(graph, timed.lines)
        real = max(plan.prediction.peak_memory)
        assert abs(max(peak) - real) <= 0.05 * real


def test_the_fixed_order_is_kept() -> None:
    made = ground(branches=1)
    shape = Shape("everywhere", 1, 4, False, 2, 2, branch_batch=2, fixed_order=True)
    hosting = made.hosting(shape)
    assert hosting is not None
    result = scheduled(hosting, 2)
    assert result is not None
    timed, _graph = result
    place = {t: i for line in timed.lines for i, t in enumerate(line)}
    lists = hosting.order(TaskGraph(hosting.problem(), bounded=False))
    assert len(lists) == 4
    for line in lists:
        assert [place[t] for t in line] == sorted(place[t] for t in line)


def test_recomputation_saves_what_is_said() -> None:
    made = ground(branches=1)
    shape = Shape("everywhere", 1, 4, False, 2, 1, branch_batch=2)
    plain, again = made.hosting(shape), made.hosting(shape._replace(recompute=frozenset({0})))
    assert plain is not None
    assert again is not None
    saved = plain.saving(0)
    assert saved > 0
    assert again.saving(0) == 0
    less = [a - b for a, b in zip(plain.need_bytes, again.need_bytes, strict=True)]
    assert max(less) == pytest.approx(saved, rel=0.35)
    assert again.times is not None
    assert plain.times is not None
    assert again.times[0][1] == plain.times[0][0] + plain.times[0][1]


def test_stages_out_of_order_or_incomplete_are_refused() -> None:
    space = chain(2)
    good = [Hosted((0, 1, 2, 3), (0,), 1), Hosted((4, 5, 6, 7), (1,), 1)]
    assert checked(space, good)
    assert not checked(space, good[::-1])
    assert not checked(space, good[:1])
    assert not checked(space, [*good, good[1]])


def test_a_size_that_the_user_fixed_is_kept() -> None:
    made = ground(branches=1)
    fixed = [0] * len(made.space.units)
    fixed[made.split.branches[0][0]] = 4
    space = Space(made.space.units, made.space.cluster, 16, made.space.memory, tuple(fixed))
    held = Ground(space, made.split)
    assert held.hosting(Shape("everywhere", 1, 4, False, 2, 1, branch_batch=2)) is None
    assert held.hosting(Shape("everywhere", 1, 4, False, 2, 1, branch_batch=4)) is not None


@pytest.mark.parametrize("layout", ["everywhere", "spread", "chain"])
@pytest.mark.parametrize("fixed", [False, True])
def test_other_mini_batches_and_evaluations_have_schedules(layout: str, fixed: bool) -> None:
    """In-flight bounds cut to what a schedule keeps still let every other mini-batch run."""
    made = ground(branches=1)
    shape = Shape(layout, 1, 4, False, 2, 2, branch_batch=2, fixed_order=fixed)
    hosting = made.hosting(shape)
    assert hosting is not None
    result = scheduled(hosting, 1)
    assert result is not None
    timed, graph = result
    kept = hosting.kept_bounds(graph, timed.lines)
    specs = [s._replace(in_flight=w) for s, w in zip(hosting.problem().stages, kept, strict=True)]
    units = made.space.units
    plan = assemble(
        units.graph,
        units.costs,
        made.space.cluster,
        hosting.choices(specs),
        batch_size=16,
        lines=graph.tasks(timed.lines),
    )
    for batch in (1, 2, 7, 15, 16, 17, 40):
        for training in (True, False):
            schedule = schedule_for(plan, batch, training=training)
            problem, _ = problem_of(plan, 0, batch, training=training)
            tasks = sorted(task for line in schedule.tasks for task in line)
            tasked = TaskGraph(problem, bounded=False)
            assert tasks == sorted(tasked.task(n) for n in range(tasked.count))
