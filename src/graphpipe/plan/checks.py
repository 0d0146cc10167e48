"""Static checks of a schedule, before any process starts.

Tasks complete and in place, in-flight bounds kept, messages of every ordered pair of ranks
in one order on both ends, and no deadlock under rendezvous semantics with all waits counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphpipe.errors import ScheduleError
from graphpipe.plan.actions import Action, ActionLists, Ordering, actions_of
from graphpipe.plan.copies import alike_copies
from graphpipe.plan.ordered import run_ordered
from graphpipe.plan.problem import PipelineProblem, problem_of
from graphpipe.plan.ranges import copy_range, micro_batch_count
from graphpipe.plan.schedule import Task
from graphpipe.plan.task_graph import TaskGraph, lane_bound

_MOST_MISSING = 1000
"""A schedule that lists less than one task in so many is refused without naming them."""

if TYPE_CHECKING:
    from graphpipe.cost.cluster import Cluster
    from graphpipe.plan.plan import Plan


def check_schedule(plan: Plan) -> None:
    """Checks the plan's schedule, for one of each set of copies that are alike.

    Raises:
        ScheduleError: naming rank and task, or the tasks that wait for one another.
    """
    lines = plan.schedule.tasks
    if len(lines) != plan.world_size:
        raise ScheduleError(
            "The schedule needs a task list for each device",
            expected=f"{plan.world_size} lists",
            got=len(lines),
        )
    used = {rank for stage in plan.stages for rank in stage.devices}
    for rank, line in enumerate(lines):
        if line and rank not in used:
            raise ScheduleError(
                "The schedule gives tasks to a device without a stage",
                where=f"rank {rank}",
                got=str(line[0]),
            )
    _check_count(plan, sum(len(line) for line in lines))
    for copy, *_ in alike_copies(plan):
        problem, owned = problem_of(plan, copy)
        ranks = {rank for stage in problem.stages for rank in stage.devices}
        own = [line if rank in ranks else () for rank, line in enumerate(lines)]
        check_lines(problem, own, plan.cluster, first_sample=owned.start)


def _check_count(plan: Plan, listed: int) -> None:
    """Compares numbers before anything is made for every task: a plan from a damaged file may
    ask for more tasks than there is memory."""
    expected = 0
    for copy in range(plan.copies):
        samples = len(copy_range(copy, plan.copies, plan.batch_size))
        for stage in plan.stages:
            count = micro_batch_count(samples, stage.micro_batch)
            expected += count * (2 if stage.has_backward else 1)
    if listed < expected and listed * _MOST_MISSING < expected:
        raise ScheduleError(
            "Tasks are missing from the schedule",
            expected=f"{expected} tasks for {plan.batch_size} samples",
            got=listed,
        )


def check_lines(
    problem: PipelineProblem,
    lines: Sequence[Sequence[Task]],
    cluster: Cluster | None = None,
    *,
    first_sample: int = 0,
) -> None:
    """Checks the task lists of one copy.

    Raises:
        ScheduleError: see :func:`check_schedule`.
    """
    graph = TaskGraph(problem, bounded=False)
    _check_complete(graph, lines)
    _check_in_flight(graph, lines)
    run_ordered(graph, graph.numbers(lines))
    for ordering in ("global", "channel"):
        lists = actions_of(problem, lines, cluster, first_sample=first_sample, ordering=ordering)
        check_actions(lists, ordering)


def _check_complete(graph: TaskGraph, lines: Sequence[Sequence[Task]]) -> None:
    seen = [False] * graph.count
    for rank, line in enumerate(lines):
        for task in line:
            number = graph.number(task)
            if graph.rank[number] != rank:
                raise ScheduleError(
                    "A task is in the list of the wrong device",
                    where=f"rank {rank}, task {task}",
                    expected=f"rank {graph.rank[number]}",
                    got=f"rank {rank}",
                )
            if seen[number]:
                raise ScheduleError("A task is scheduled twice", where=f"rank {rank}, task {task}")
            seen[number] = True
    missing = [graph.task(number) for number in range(graph.count) if not seen[number]]
    if missing:
        raise ScheduleError(
            "Tasks are missing from the schedule",
            where=", ".join(str(task) for task in missing[:5]),
            expected=f"{graph.count} tasks",
            got=f"{graph.count - len(missing)}",
        )


def _check_in_flight(graph: TaskGraph, lines: Sequence[Sequence[Task]]) -> None:
    for rank, line in enumerate(lines):
        held: dict[int, int] = {}
        last: dict[tuple[str, int], int] = {}
        begun: set[Task] = set()
        for task in line:
            spec = graph.problem.stages[task.stage]
            if last.get((task.kind, task.stage), -1) > task.micro_batch:
                raise ScheduleError(
                    "Micro-batches of a stage must run in order on each device",
                    where=f"rank {rank}, task {task}",
                )
            last[task.kind, task.stage] = task.micro_batch
            if not spec.has_backward:
                continue
            if task.kind == "B" and Task("F", task.stage, task.micro_batch) not in begun:
                raise ScheduleError(
                    "A backward comes before its forward", where=f"rank {rank}, task {task}"
                )
            begun.add(task)
            held[task.stage] = held.get(task.stage, 0) + (1 if task.kind == "F" else -1)
            most = lane_bound(spec.in_flight, spec.replicas, spec.micro_batch)
            if held[task.stage] > most:
                raise ScheduleError(
                    "The schedule exceeds the in-flight bound of a stage",
                    where=f"rank {rank}, task {task}",
                    expected=f"at most {most} micro-batches (W = {spec.in_flight} samples, "
                    f"{spec.replicas} x {spec.micro_batch})",
                    got=held[task.stage],
                )


def check_actions(lists: ActionLists, ordering: Ordering) -> None:
    """Plays action lists through under rendezvous semantics.

    ``channel``: every ordered pair of ranks is a FIFO that progresses on its own. ``global``:
    the operations of a rank run one after another in the order of their issue, each until its
    peer has come to the matching one, and tags do not exist.

    Raises:
        ScheduleError: if the ends of a channel disagree on the order of messages, or nothing
            can go on with work left; it names what the ranks wait for.
    """
    _check_order(lists)
    if ordering == "channel":
        _play_channels(lists)
    else:
        _play_streams(lists)


def _check_order(lists: ActionLists) -> None:
    """Both ends of every channel have its messages in one order, each once."""
    ends: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for rank, line in enumerate(lists.lines):
        for action in line:
            if action.kind in ("send", "recv"):
                message = lists.messages[action.message]
                side = 0 if action.kind == "send" else 1
                if rank != (message.source, message.target)[side]:
                    raise ScheduleError(
                        "A rank handles a message of another rank",
                        where=f"rank {rank}, {action.kind} of message {action.message}",
                    )
                both = ends.setdefault((message.source, message.target), ([], []))
                both[side].append(action.message)
    for (source, target), (sent, received) in ends.items():
        if sent != received:
            at = next(
                (k for k, pair in enumerate(zip(sent, received, strict=False))
                 if pair[0] != pair[1]),
                min(len(sent), len(received)),
            )  # fmt: skip
            raise ScheduleError(
                "The ends of a channel have its messages in different orders",
                where=f"rank {source} to rank {target}, position {at}",
                expected=f"sent: {sent[at : at + 3]}",
                got=f"received: {received[at : at + 3]}",
            )


def _play_channels(lists: ActionLists) -> None:
    """With one order on both ends, message k completes when both ends have posted it."""
    posted = [0] * len(lists.messages)
    waiting: dict[int, list[int]] = {}
    place = [0] * len(lists.lines)
    work = list(range(len(lists.lines)))
    while work:
        rank = work.pop()
        line = lists.lines[rank]
        at = place[rank]
        while at < len(line):
            kind, _, number = line[at]
            if kind == "send" or kind == "recv":
                posted[number] += 1
                if posted[number] == 2:
                    work += waiting.pop(number, ())
            elif kind != "run" and posted[number] < 2:
                waiting.setdefault(number, []).append(rank)
                break
            at += 1
        place[rank] = at
    _check_done(lists, place, [])


def _play_streams(lists: ActionLists) -> None:
    streams: list[deque[tuple[int, int]]] = [deque() for _ in lists.lines]
    done = [False] * len(lists.messages)
    waiting: dict[int, list[int]] = {}
    place = [0] * len(lists.lines)
    work = list(range(len(lists.lines)))
    while work:
        rank = work.pop()
        line = lists.lines[rank]
        at = place[rank]
        while at < len(line):
            kind, _, number = line[at]
            if kind == "send" or kind == "recv":
                message = lists.messages[number]
                peer = message.target if kind == "send" else message.source
                streams[rank].append((number, peer))
                if len(streams[rank]) == 1:
                    _match(streams, rank, done, waiting, work)
            elif kind != "run" and not done[number]:
                waiting.setdefault(number, []).append(rank)
                break
            at += 1
        place[rank] = at
    _check_done(lists, place, [number for number, ok in enumerate(done) if not ok])


def _match(
    streams: Sequence[deque[tuple[int, int]]],
    rank: int,
    done: list[bool],
    waiting: dict[int, list[int]],
    work: list[int],
) -> None:
    """Completes messages at the heads of streams, from ``rank``'s on."""
    look = [rank]
    while look:
        here = look.pop()
        if not streams[here]:
            continue
        number, peer = streams[here][0]
        if streams[peer] and streams[peer][0] == (number, here):
            streams[here].popleft()
            streams[peer].popleft()
            done[number] = True
            work += waiting.pop(number, ())
            look += [here, peer]


def _check_done(lists: ActionLists, place: Sequence[int], open_messages: Sequence[int]) -> None:
    stuck: list[tuple[int, Action]] = [
        (rank, line[at])
        for rank, (line, at) in enumerate(zip(lists.lines, place, strict=True))
        if at < len(line)
    ]
    if not stuck and not open_messages:
        return
    shown = "; ".join(
        f"rank {rank} at {action.task} ({action.kind} of {_named(lists, action.message)})"
        for rank, action in stuck[:4]
    ) or ", ".join(_named(lists, number) for number in open_messages[:4])
    raise ScheduleError(
        "The communication deadlocks under rendezvous semantics",
        where=shown,
        fix="Make the action lists with build_actions",
    )


def _named(lists: ActionLists, number: int) -> str:
    m = lists.messages[number]
    return f"message {number}, {m.kind} from rank {m.source} to {m.target}"
