"""The shared network model: fair shares, cards, order, and its agreement with the channel
model where nothing is shared."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.cost.cluster import Cluster, Device, Network
from graphpipe.errors import ScheduleError
from graphpipe.plan.builders import build_schedule
from graphpipe.plan.ordered import Sent, run_ordered
from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec
from graphpipe.plan.task_graph import TaskGraph
from graphpipe.simulate.shared import run_shared
from tests.plan.plans import cluster_of
from tests.plan.random_problems import random_problem

NET = Network(
    intra_node_bandwidth=1e9,
    intra_node_latency=5e-9,
    inter_node_bandwidth=5e8,
    inter_node_latency=7e-9,
    devices_per_nic=2,
)


def forward_only(rank: int, time: int = 10) -> StageSpec:
    return StageSpec(1, 1, 1, 1, (rank,), time, 0, False)


def sent_by(
    stages: tuple[StageSpec, ...], edges: tuple[EdgeSpec, ...], cluster: Cluster
) -> list[Sent]:
    problem = PipelineProblem(stages, edges, 1, cluster.world_size)
    built = build_schedule(problem, "list")
    (run,) = run_shared([(built.graph, built.lines)], cluster, record=True)
    return run.sent


def test_two_messages_from_one_rank_share_its_link() -> None:
    stages = (forward_only(0), forward_only(1), forward_only(2))
    edges = (EdgeSpec(0, 1, 100.0), EdgeSpec(0, 2, 40.0))
    # Half speed each until the short one has left at 10 + 80; the long one then needs 60 more.
    assert sorted(sent_by(stages, edges, cluster_of(3, NET)), key=lambda s: s.target) == [
        Sent(0, 1, 10, 155, 100),
        Sent(0, 2, 10, 95, 40),
    ]


def test_two_messages_to_one_rank_share_its_link() -> None:
    stages = (forward_only(0), forward_only(1), forward_only(2))
    edges = (EdgeSpec(0, 2, 100.0), EdgeSpec(1, 2, 100.0))
    assert {s.arrival_ns for s in sent_by(stages, edges, cluster_of(3, NET))} == {215}


def test_a_later_message_slows_an_earlier_one_from_then_on() -> None:
    stages = (forward_only(0), forward_only(1, 60), forward_only(2))
    edges = (EdgeSpec(0, 2, 100.0), EdgeSpec(1, 2, 100.0))
    first, second = sorted(sent_by(stages, edges, cluster_of(3, NET)), key=lambda s: s.source)
    # 50 bytes alone until 60, 50 bytes at half speed until 160; then the other's rest alone.
    assert (first.start_ns, first.arrival_ns) == (10, 165)
    assert (second.start_ns, second.arrival_ns) == (60, 60 + 100 + 50 + 5)


def test_ranks_of_a_node_share_a_card_between_nodes() -> None:
    cluster = cluster_of(8, NET, per_node=4)
    edges = (EdgeSpec(0, 2, 100.0), EdgeSpec(1, 3, 100.0))
    same = (forward_only(0), forward_only(1), forward_only(4), forward_only(6))
    assert {s.arrival_ns for s in sent_by(same, edges, cluster)} == {10 + 400 + 7}
    apart = (forward_only(0), forward_only(2), forward_only(4), forward_only(6))
    assert {s.arrival_ns for s in sent_by(apart, edges, cluster)} == {10 + 200 + 7}


def test_messages_between_the_same_ranks_follow_one_another() -> None:
    stages = (forward_only(0), forward_only(0), forward_only(1))
    edges = (EdgeSpec(0, 2, 100.0), EdgeSpec(1, 2, 10.0))
    found = sorted(sent_by(stages, edges, cluster_of(2, NET)), key=lambda s: s.start_ns)
    assert [(s.start_ns, s.arrival_ns) for s in found] == [(10, 115), (110, 125)]


def test_nothing_takes_time_without_a_bandwidth() -> None:
    stages = (forward_only(0), forward_only(1))
    assert sent_by(stages, (EdgeSpec(0, 1, 100.0),), cluster_of(2)) == [Sent(0, 1, 10, 10, 100)]


@given(seed=st.integers(0, 10**6), shared=st.booleans())
@settings(max_examples=80, deadline=None)
def test_it_agrees_with_the_channel_model_where_messages_take_only_latency(
    seed: int, shared: bool
) -> None:
    problem = random_problem(seed, shared=shared)
    cluster = Cluster(
        devices=tuple(
            Device(kind="toy", memory_bytes=1, node=r // 2) for r in range(problem.world_size)
        ),
        network=Network(intra_node_latency=4e-9, inter_node_latency=3e-8),
    )
    built = build_schedule(problem, raise_bounds=True)
    (run,) = run_shared([(built.graph, built.lines)], cluster)
    assert run.end == run_ordered(built.graph, built.lines, cluster).end


@given(seed=st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_a_chain_of_ranks_that_only_talk_to_one_other_is_as_in_the_channel_model(
    seed: int,
) -> None:
    """Two ranks: each direction has one sender and one receiver, so nothing is shared."""
    problem = random_problem(seed, most_stages=2, shared=False)
    if problem.world_size > 2:
        return
    cluster = cluster_of(max(1, problem.world_size), NET)
    built = build_schedule(problem, raise_bounds=True)
    (run,) = run_shared([(built.graph, built.lines)], cluster)
    assert run.end == run_ordered(built.graph, built.lines, cluster).end


def test_copies_share_cards() -> None:
    cluster = cluster_of(8, NET, per_node=4)
    parts = []
    for ranks in ((0, 4), (1, 5)):
        problem = PipelineProblem(
            (forward_only(ranks[0]), forward_only(ranks[1])), (EdgeSpec(0, 1, 100.0),), 1, 8
        )
        built = build_schedule(problem)
        parts.append((built.graph, built.lines))
    both = run_shared(parts, cluster)
    alone = run_shared(parts[:1], cluster)
    assert [run.makespan_ns for run in both] == [10 + 400 + 7 + 10] * 2
    assert alone[0].makespan_ns == 10 + 200 + 7 + 10
    assert both[0].card[0] == both[1].card[1] == 410


def test_deadlock_is_refused() -> None:
    problem = PipelineProblem(
        (StageSpec(1, 1, 1, 1, (0,), 1, 2), StageSpec(1, 1, 1, 1, (1,), 1, 2)),
        (EdgeSpec(0, 1),),
        1,
        2,
    )
    graph = TaskGraph(problem, bounded=False)
    with pytest.raises(ScheduleError, match="deadlock"):
        run_shared([(graph, [[1, 0], [2, 3]])], cluster_of(2, NET))
