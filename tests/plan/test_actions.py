"""Action lists: complete, in order, and without deadlock on the strictest back-ends."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.cost.cluster import Cluster, Device, Network
from graphpipe.plan.actions import Action, ActionLists, Ordering, actions_of
from graphpipe.plan.builders import Built, build_schedule
from graphpipe.plan.in_flight import with_bounds
from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec
from tests.plan.random_problems import random_problem
from tests.plan.transport_models import Model, Stuck, execute

seeds = st.integers(0, 10**6)


def cluster_for(world: int, seed: int = 0) -> Cluster:
    rng = random.Random(seed)
    return Cluster(
        devices=tuple(Device(kind="toy", memory_bytes=1, node=r // 3) for r in range(world)),
        network=Network(
            intra_node_bandwidth=rng.choice([1e9, 2e10, None]),
            intra_node_latency=rng.choice([0.0, 3e-9]),
            inter_node_bandwidth=rng.choice([5e8, 1e10]),
            inter_node_latency=rng.choice([0.0, 2e-8]),
        ),
    )


def lists_for(
    seed: int, ordering: Ordering = "channel", *, shared: bool = True, lookahead: int = 1
) -> tuple[Built, ActionLists]:
    problem = random_problem(seed, shared=shared, zero_times=seed % 7 == 0)
    built = build_schedule(problem, raise_bounds=True)
    lists = actions_of(
        built.problem,
        built.graph.tasks(built.lines),
        cluster_for(problem.world_size, seed),
        first_sample=100,
        ordering=ordering,
        lookahead=lookahead,
    )
    return built, lists


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("model", ["rendezvous", "blocking"])
@given(seed=seeds)
@settings(max_examples=200, deadline=None)
def test_global_order_never_deadlocks_without_tags(shared: bool, model: Model, seed: int) -> None:
    built, lists = lists_for(seed, "global", shared=shared)
    order = list(range(built.problem.world_size))
    random.Random(seed).shuffle(order)
    ran = execute(lists, model, order)
    assert len(ran) == built.graph.count


@given(seed=seeds, lookahead=st.integers(0, 4), shared=st.booleans())
@settings(max_examples=200, deadline=None)
def test_channel_order_never_deadlocks_on_fifos(seed: int, lookahead: int, shared: bool) -> None:
    built, lists = lists_for(seed, "channel", shared=shared, lookahead=lookahead)
    order = list(range(built.problem.world_size))
    random.Random(seed).shuffle(order)
    assert len(execute(lists, "channels", order)) == built.graph.count
    # Nor do the lists of the global order there.
    execute(lists_for(seed, "global", shared=shared)[1], "channels", order)


@given(seed=seeds, ordering=st.sampled_from(["global", "channel"]))
@settings(max_examples=150, deadline=None)
def test_each_step_comes_once_and_in_its_place(seed: int, ordering: Ordering) -> None:
    built, lists = lists_for(seed, ordering)
    tasks = built.graph.tasks(built.lines)
    for rank, line in enumerate(lists.lines):
        assert [a.task for a in line if a.kind == "run"] == tasks[rank]
        seen: dict[tuple[str, int], int] = {}
        for at, action in enumerate(line):
            if action.kind == "run":
                continue
            assert (action.kind, action.message) not in seen
            seen[action.kind, action.message] = at
            message = lists.messages[action.message]
            sending = action.kind in ("send", "wait_send")
            assert rank == (message.source if sending else message.target)
            stage = message.source_stage if sending else message.target_stage
            index = message.source_micro_batch if sending else message.target_micro_batch
            kind = "B" if message.kind == "B" else "F"
            assert action.task == (kind, stage, index)
        run = {a.task: at for at, a in enumerate(line) if a.kind == "run"}
        for number, message in enumerate(lists.messages):
            if message.source == rank:
                action = line[seen["send", number]]
                assert run[action.task] < seen["send", number] < seen["wait_send", number]
            if message.target == rank:
                action = line[seen["recv", number]]
                assert seen["recv", number] < seen["wait_recv", number] < run[action.task]
    assert sum(a.kind == "send" for line in lists.lines for a in line) == len(lists.messages)


@given(seed=seeds)
@settings(max_examples=100, deadline=None)
def test_both_ends_of_a_channel_use_one_order(seed: int) -> None:
    _, lists = lists_for(seed)
    sides: dict[tuple[int, int, str], list[int]] = {}
    for line in lists.lines:
        for action in line:
            if action.kind in ("send", "recv"):
                m = lists.messages[action.message]
                sides.setdefault((m.source, m.target, action.kind), []).append(action.message)
    for (source, target, kind), order in sides.items():
        assert order == sorted(order)
        assert order == sides[source, target, "recv" if kind == "send" else "send"]


def chain_lists(ordering: Ordering = "channel", lookahead: int = 0) -> ActionLists:
    stages = (StageSpec(1, 1, 1, 1, (0,), 1, 2), StageSpec(1, 1, 1, 1, (1,), 1, 2))
    problem = with_bounds(PipelineProblem(stages, (EdgeSpec(0, 1),), 3, 2))
    built = build_schedule(problem)
    return actions_of(
        problem, built.graph.tasks(built.lines), ordering=ordering, lookahead=lookahead
    )


def short(action: Action, lists: ActionLists) -> str:
    if action.kind == "run":
        return str(action.task)
    m = lists.messages[action.message]
    return f"{action.kind}:{m.kind}{m.start}"


def test_a_chain_of_two_reads_like_1f1b() -> None:
    lists = chain_lists("global")
    first, second = (" ".join(short(a, lists) for a in line) for line in lists.lines)
    assert first == (
        "F0.0 send:F0 F0.1 send:F1 recv:B0 wait_recv:B0 wait_send:F0 B0.0 recv:B1 F0.2 send:F2 "
        "wait_recv:B1 wait_send:F1 B0.1 recv:B2 wait_recv:B2 wait_send:F2 B0.2"
    )
    assert second == (
        "recv:F0 recv:F1 wait_recv:F0 F1.0 B1.0 send:B0 wait_recv:F1 F1.1 B1.1 send:B1 recv:F2 "
        "wait_recv:F2 wait_send:B0 F1.2 B1.2 send:B2 wait_send:B1 wait_send:B2"
    )


def test_lookahead_posts_receives_earlier() -> None:
    lists = chain_lists(lookahead=2)
    line = [short(a, lists) for a in lists.lines[1]]
    assert line[:4] == ["recv:F0", "recv:F1", "wait_recv:F0", "F1.0"]


def test_the_model_notices_a_deadlock() -> None:
    lists = chain_lists("global")
    first = list(lists.lines[0])
    sends = [at for at, a in enumerate(first) if a.kind == "send"]
    first[sends[0]], first[sends[1]] = first[sends[1]], first[sends[0]]
    swapped = ActionLists(lists.messages, (tuple(first), lists.lines[1]))
    with pytest.raises(AssertionError):
        execute(swapped, "rendezvous", [0, 1])
    late = [a for a in lists.lines[1] if a.kind != "recv"]
    with pytest.raises(Stuck):
        execute(ActionLists(lists.messages, (lists.lines[0], tuple(late))), "channels", [0, 1])


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(4))
def test_thousands_of_plans_never_deadlock(part: int) -> None:
    for seed in range(10**6 + 500 * part, 10**6 + 500 * part + 500):
        for shared in (False, True):
            built, lists = lists_for(seed, "global", shared=shared)
            order = list(range(built.problem.world_size))
            random.Random(seed).shuffle(order)
            for model in ("rendezvous", "blocking", "channels"):
                assert len(execute(lists, model, order)) == built.graph.count
            _, lists = lists_for(seed, "channel", shared=shared)
            execute(lists, "channels", order)
