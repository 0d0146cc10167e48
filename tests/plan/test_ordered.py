"""The channel model: what its definition says, by hand and against a second computation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.cost.cluster import Cluster, Network, NodeLink
from graphpipe.errors import ScheduleError
from graphpipe.plan.builders import build_schedule
from graphpipe.plan.messages import messages
from graphpipe.plan.ordered import Sent, is_free, linear_extension, run_ordered
from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec
from graphpipe.plan.task_graph import TaskGraph
from tests.plan.plans import cluster_of
from tests.plan.random_problems import random_problem
from tests.plan.test_actions import cluster_for

NET = Network(
    intra_node_bandwidth=1e9,  # 1 byte a nanosecond
    intra_node_latency=5e-9,
    inter_node_bandwidth=1e9,
)


def test_a_message_takes_wire_and_latency() -> None:
    stages = (StageSpec(1, 1, 1, 2, (0,), 10, 20), StageSpec(1, 1, 1, 1, (1,), 10, 20))
    problem = PipelineProblem(stages, (EdgeSpec(0, 1, 3.0, 4.0, 2.0),), 1, 2)
    built = build_schedule(problem)
    run = run_ordered(built.graph, built.lines, cluster_of(2, NET), record=True)
    # F0 ends at 10, 7 bytes, 5 latency: arrives at 22; F1 22-32, B1 32-52, 2 bytes: 59; B0 79.
    assert run.sent == [Sent(0, 2, 10, 22, 7), Sent(3, 1, 52, 59, 2)]
    assert (run.device, run.card) == ([79, 52], [17, 54])


def test_a_card_sends_one_message_after_another_whatever_their_targets() -> None:
    stages = (
        StageSpec(1, 1, 1, 1, (0,), 10, 0, False),
        StageSpec(1, 1, 1, 1, (1,), 1, 0, False),
        StageSpec(1, 1, 1, 1, (2,), 1, 0, False),
    )
    edges = (EdgeSpec(0, 1, 100.0), EdgeSpec(0, 2, 7.0))
    problem = PipelineProblem(stages, edges, 1, 3)
    run = run_ordered(
        TaskGraph(problem, bounded=False), [[0], [1], [2]], cluster_of(3, NET), record=True
    )
    assert run.sent == [Sent(0, 1, 10, 115, 100), Sent(0, 2, 110, 122, 7)]


def test_a_credit_has_no_bytes_but_latency() -> None:
    stages = (StageSpec(1, 1, 1, 1, (0,), 10, 0, False), StageSpec(1, 1, 1, 1, (1,), 10, 20))
    problem = PipelineProblem(stages, (EdgeSpec(0, 1, 1.0),), 2, 2)
    graph = TaskGraph(problem, bounded=False)
    run = run_ordered(graph, [[0, 1], [2, 4, 3, 5]], cluster_of(2, NET), record=True)
    # F0.0 10 -> 16; F1.0 ends at 26; its credit arrives at 31, F0.1 ends at 41.
    assert Sent(2, 1, 26, 31, 0) in run.sent
    assert run.end[1] == 41


@given(seed=st.integers(0, 10**6), shared=st.booleans())
@settings(max_examples=100, deadline=None)
def test_every_rank_can_compute_its_times_from_what_it_receives(seed: int, shared: bool) -> None:
    """An independent player in which ranks know only their own clocks and the arrival times
    that messages carry."""
    problem = random_problem(seed, shared=shared)
    cluster = cluster_for(problem.world_size, seed)
    built = build_schedule(problem, raise_bounds=True)
    graph = built.graph
    run = run_ordered(graph, built.lines, cluster, record=True)
    outgoing: dict[int, list[tuple[int, int, int, int]]] = {}
    needs: dict[int, list[int]] = {}
    for number, m in enumerate(messages(built.problem)):
        ends = graph.backward if m.kind == "B" else graph.forward
        source = ends[m.source_stage] + m.source_micro_batch
        target = ends[m.target_stage] + m.target_micro_batch
        outgoing.setdefault(source, []).append(
            (m.kind == "C", m.edge, m.target_micro_batch, number)
        )
        needs.setdefault(target, []).append(number)
    table = messages(built.problem)
    arrival: dict[int, int] = {}
    device, card = [0] * problem.world_size, [0] * problem.world_size
    place = [0] * problem.world_size
    end: dict[int, int] = {}
    moved = True
    while moved:
        moved = False
        for rank, line in enumerate(built.lines):
            while place[rank] < len(line):
                task = line[place[rank]]
                if any(n not in arrival for n in needs.get(task, ())):
                    break
                start = max([device[rank], *(arrival[n] for n in needs.get(task, ()))])
                device[rank] = end[task] = start + graph.duration[task]
                for *_, number in sorted(outgoing.get(task, ())):
                    m = table[number]
                    wire = cluster.transfer_ns(m.source, m.target, m.nbytes) if m.nbytes else 0
                    card[rank] = max(card[rank], end[task]) + wire
                    arrival[number] = card[rank] + cluster.latency_ns(m.source, m.target)
                place[rank] += 1
                moved = True
    assert [end[t] for t in range(graph.count)] == run.end
    assert device == run.device
    if not is_free(cluster):  # else nothing is sent, and cards are free at once
        assert card == run.card
        assert sorted(arrival.values()) == sorted(sent.arrival_ns for sent in run.sent)


@given(seed=st.integers(0, 10**6), zero=st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_linear_extension_respects_every_dependency(seed: int, zero: bool) -> None:
    problem = random_problem(seed, zero_times=zero)
    built = build_schedule(problem, raise_bounds=True)
    run = run_ordered(built.graph, built.lines, cluster_for(problem.world_size, seed))
    order = linear_extension(run)
    when = {task: position for position, task in enumerate(order)}
    assert sorted(order) == list(range(built.graph.count))
    for task in range(built.graph.count):
        assert all(when[task] < when[item] for item in built.graph.successors[task])
    for line in built.lines:
        assert [when[task] for task in line] == sorted(when[task] for task in line)


def test_deadlock_names_ranks_tasks_and_what_is_in_no_list() -> None:
    stages = (StageSpec(1, 1, 1, 1, (0,), 1, 2), StageSpec(1, 1, 1, 1, (1,), 1, 2))
    graph = TaskGraph(PipelineProblem(stages, (EdgeSpec(0, 1),), 1, 2), bounded=False)
    with pytest.raises(ScheduleError, match=r"rank 0 at B0.0 waits for B1.0 \(in no list\)"):
        run_ordered(graph, [[0, 1], [2]])


def test_free_networks_are_known() -> None:
    assert is_free(cluster_of(2))
    assert not is_free(cluster_of(2, NET))
    assert is_free(cluster_of(2, Network(inter_node_latency=1.0)))
    assert not is_free(cluster_of(2, Network(inter_node_latency=1.0), per_node=1))
    slow = Cluster(**{**dict(cluster_of(2)), "node_links": (NodeLink(bandwidth=1.0),)})
    assert not is_free(slow)
