"""Static checks of schedules and action lists."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.errors import ScheduleError
from graphpipe.plan.actions import Action, ActionLists, Ordering
from graphpipe.plan.builders import build_schedule
from graphpipe.plan.checks import check_actions, check_lines
from tests.plan.random_problems import random_problem
from tests.plan.test_actions import chain_lists, lists_for
from tests.plan.transport_models import execute


@given(seed=st.integers(0, 10**6), shared=st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_builders_make_passes(seed: int, shared: bool) -> None:
    built = build_schedule(random_problem(seed, shared=shared), raise_bounds=True)
    check_lines(built.problem, built.graph.tasks(built.lines))


@given(
    seed=st.integers(0, 10**6),
    ordering=st.sampled_from(["global", "channel"]),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_the_check_agrees_with_a_model_of_the_back_end(
    seed: int, ordering: Ordering, data: st.DataObject
) -> None:
    """Moving one step of one rank: where the check passes, the strict model runs through;
    where the check refuses, the model does not."""
    built, lists = lists_for(seed, ordering)
    rank = data.draw(st.integers(0, built.problem.world_size - 1))
    line = list(lists.lines[rank])
    if len(line) > 1:
        step = line.pop(data.draw(st.integers(0, len(line) - 1)))
        line.insert(data.draw(st.integers(0, len(line))), step)
    lines = list(lists.lines)
    lines[rank] = tuple(line)
    moved = ActionLists(lists.messages, tuple(lines))
    order = list(range(len(lines)))
    model = "rendezvous" if ordering == "global" else "channels"
    try:
        check_actions(moved, ordering)
    except ScheduleError:
        with pytest.raises(AssertionError):
            execute(moved, model, order)
    else:
        execute(moved, model, order)


def swapped(kind: str) -> ActionLists:
    lists = chain_lists("global")
    line = list(lists.lines[0])
    places = [at for at, action in enumerate(line) if action.kind == kind]
    line[places[0]], line[places[1]] = line[places[1]], line[places[0]]
    return ActionLists(lists.messages, (tuple(line), lists.lines[1]))


def test_different_orders_at_the_ends_of_a_channel_are_named() -> None:
    with pytest.raises(ScheduleError, match=r"different orders \(at rank 0 to rank 1, position 0"):
        check_actions(swapped("send"), "channel")


def test_a_send_waited_for_too_early_deadlocks_by_name() -> None:
    lists = chain_lists("global")
    line = list(lists.lines[1])
    # Rank 1 waits for its first gradient to be taken before it posts what rank 0 sends first.
    wait = next(a for a in line if a.kind == "wait_send")
    line.remove(wait)
    send = next(at for at, a in enumerate(line) if a.kind == "send")
    line.insert(send + 1, wait)
    third = next(at for at, a in enumerate(line) if a.kind == "recv" and a.message > wait.message)
    assert third > send
    early = ActionLists(lists.messages, (lists.lines[0], tuple(line)))
    check_actions(early, "channel")
    mute = [a for a in lists.lines[0] if a.kind != "wait_recv"]
    late: list[Action] = [a for a in mute if a.kind != "recv"]
    late += [a for a in mute if a.kind == "recv"]
    with pytest.raises(ScheduleError, match=r"deadlocks under rendezvous.*rank"):
        check_actions(ActionLists(lists.messages, (tuple(late), tuple(line))), "channel")


def test_a_message_of_another_rank_is_refused() -> None:
    lists = chain_lists()
    with pytest.raises(ScheduleError, match="another rank"):
        check_actions(ActionLists(lists.messages, lists.lines[::-1]), "channel")
