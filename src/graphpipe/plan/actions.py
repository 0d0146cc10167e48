"""Action lists: what every rank does in one iteration, computation and communication.

Runtime and emulator execute these lists as they are. All of them are projections of one
global order of events, in which every task is followed by the messages that it sends. That
order respects every dependency, so on every rank

- the receive of a message is posted where the global order has it: after the rank's own
  tasks that come earlier in it and after its earlier messages, before the task during which,
  by the simulated times, the message is sent;
- even if every send and receive blocked until its peer came, the first event of the global
  order that is not done could always be done. So the lists cannot deadlock where tags are
  ignored and operations of one rank run one after another in the order of their issue, as
  NCCL does it.

Where channels (ordered pairs of ranks) progress on their own, as with gloo, receives may
be posted ``lookahead`` tasks earlier, so that a sender that is ahead of the simulated times
need not wait. Within each channel receives are always in the order of the sends.

A send is waited for where that is known to return at once: before the first task of the
sender that receives something which the peer sent at or after the message's use. That is a
forward's own backward where a gradient comes back, the forward that waits for a credit, and
for a gradient the next forward that the other side sent after using it. Sends without
such a task are waited for at the end of the list.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from graphpipe.cost.cluster import Cluster
from graphpipe.plan.messages import Message, messages
from graphpipe.plan.ordered import linear_extension, run_ordered
from graphpipe.plan.problem import PipelineProblem, problem_of
from graphpipe.plan.reschedule import schedule_for
from graphpipe.plan.schedule import Task
from graphpipe.plan.task_graph import TaskGraph

if TYPE_CHECKING:
    from graphpipe.plan.plan import Plan

Ordering = Literal["global", "channel"]
ActionKind = Literal["recv", "wait_recv", "run", "send", "wait_send"]


class Action(NamedTuple):
    """One step of a rank.

    ``recv`` posts the receive of ``message`` and ``send`` starts sending it; neither blocks.
    ``wait_recv`` and ``wait_send`` wait for it. ``run`` runs ``task``. ``message`` is an index
    into ``ActionLists.messages``, -1 for ``run``; ``task`` is the task that the step serves:
    for ``recv`` and ``wait_recv`` the one that needs the message, for ``send`` the one that
    made it, for ``wait_send`` likewise.
    """

    kind: ActionKind
    task: Task
    message: int = -1


class ActionLists(NamedTuple):
    """The messages of an iteration and what every rank does.

    Attributes:
        messages: All messages of the iteration in the global order: the index of a message is
            its sequence number.
        lines: The actions by rank.
    """

    messages: tuple[Message, ...]
    lines: tuple[tuple[Action, ...], ...]


def build_actions(
    plan: Plan,
    batch_size: int | None = None,
    *,
    training: bool = True,
    ordering: Ordering = "channel",
    lookahead: int = 1,
) -> ActionLists:
    """The action lists of a plan for a mini-batch.

    Args:
        plan: A plan that passed its checks.
        batch_size: Samples of this mini-batch, by default the plan's. Another size gets a
            schedule of its own from the same builder.
        training: False for an evaluation: forwards only.
        ordering: ``global`` for back-ends where only the order of issue counts (NCCL),
            ``channel`` where every ordered pair of ranks progresses on its own (gloo).
        lookahead: Under ``channel`` ordering, tasks by which receives are posted earlier.

    Raises:
        ScheduleError: if the schedule deadlocks.
    """
    lines = schedule_for(plan, batch_size, training=training).tasks
    return merge_actions(
        [
            copy_actions(
                plan,
                copy,
                lines,
                batch_size,
                training=training,
                ordering=ordering,
                lookahead=lookahead,
            )
            for copy in range(plan.copies)
        ]
    )


def copy_actions(
    plan: Plan,
    copy: int,
    lines: Sequence[Sequence[Task]],
    batch_size: int | None = None,
    *,
    training: bool = True,
    ordering: Ordering = "channel",
    lookahead: int = 1,
) -> ActionLists:
    """The action lists of one copy of a plan, given the task lists of all ranks; the other
    arguments are those of :func:`build_actions`. Ranks of other copies get empty lists."""
    problem, owned = problem_of(plan, copy, batch_size, training=training)
    ranks = {rank for stage in problem.stages for rank in stage.devices}
    return actions_of(
        problem,
        [line if rank in ranks else () for rank, line in enumerate(lines)],
        plan.cluster,
        first_sample=owned.start,
        ordering=ordering,
        lookahead=lookahead,
    )


def merge_actions(parts: Sequence[ActionLists]) -> ActionLists:
    """Lists of copies, which share no rank, as one."""
    if len(parts) == 1:
        return parts[0]
    table: list[Message] = []
    lines: list[tuple[Action, ...]] = [() for _ in parts[0].lines]
    for part in parts:
        shift = len(table)
        table += part.messages
        for rank, line in enumerate(part.lines):
            if line:
                assert not lines[rank], "two copies share a rank"
                lines[rank] = tuple(
                    item if item.message < 0 else item._replace(message=item.message + shift)
                    for item in line
                )
    return ActionLists(tuple(table), tuple(lines))


def actions_of(
    problem: PipelineProblem,
    lines: Sequence[Sequence[Task]],
    cluster: Cluster | None = None,
    *,
    first_sample: int = 0,
    ordering: Ordering = "channel",
    lookahead: int = 1,
) -> ActionLists:
    """The action lists of one copy; see :func:`build_actions`."""
    graph = TaskGraph(problem, bounded=False)
    numbers = graph.numbers(lines)
    run = run_ordered(graph, numbers, cluster)
    when = [0] * graph.count
    for position, task in enumerate(linear_extension(run)):
        when[task] = position
    place = [0] * graph.count
    for line in numbers:
        for position, task in enumerate(line):
            place[task] = position

    def ends(message: Message) -> tuple[int, int]:
        """Task numbers of sender and receiver."""
        sender = graph.backward if message.kind == "B" else graph.forward
        return (
            sender[message.source_stage] + message.source_micro_batch,
            sender[message.target_stage] + message.target_micro_batch,
        )

    # ``messages`` has those of one task in the order in which it sends them; sorting is stable.
    found = [(ends(message), message) for message in messages(problem, first_sample)]
    found.sort(key=lambda item: when[item[0][0]])
    pairs = [item[0] for item in found]
    table = [item[1] for item in found]
    outgoing: list[list[int]] = [[] for _ in range(graph.count)]
    incoming: list[list[int]] = [[] for _ in range(graph.count)]
    received: list[list[int]] = [[] for _ in numbers]
    for number, (source, target) in enumerate(pairs):
        outgoing[source].append(number)
        incoming[target].append(number)
        received[table[number].target].append(number)
    waits = _send_waits(table, pairs, place, [len(line) for line in numbers])
    ahead = lookahead if ordering == "channel" else 0
    tasks = [graph.task(number) for number in range(graph.count)]
    out: list[tuple[Action, ...]] = []
    for rank, line in enumerate(numbers):
        order = [when[task] for task in line]
        # Receives before the line's task number p, and after the rank's earlier sends.
        posted: list[list[int]] = [[] for _ in range(len(line) + 1)]
        for number in received[rank]:
            p = bisect_left(order, when[pairs[number][0]]) - ahead
            posted[max(0, p)].append(number)
        actions: list[Action] = []
        for p, task in enumerate(line):
            for number in posted[p]:
                actions.append(Action("recv", tasks[pairs[number][1]], number))
            this = tasks[task]
            for number in incoming[task]:
                actions.append(Action("wait_recv", this, number))
            for number in waits.get((rank, p), ()):
                actions.append(Action("wait_send", tasks[pairs[number][0]], number))
            actions.append(Action("run", this))
            for number in outgoing[task]:
                actions.append(Action("send", this, number))
        for number in waits.get((rank, len(line)), ()):
            actions.append(Action("wait_send", tasks[pairs[number][0]], number))
        assert not posted[len(line)]
        out.append(tuple(actions))
    return ActionLists(tuple(table), tuple(out))


def _send_waits(
    table: Sequence[Message],
    pairs: Sequence[tuple[int, int]],
    place: Sequence[int],
    lengths: Sequence[int],
) -> dict[tuple[int, int], list[int]]:
    """For (rank, position in its line) the sends to wait for before that task; the position
    after the last task stands for the end of the list."""
    arrivals: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for message, (source, target) in zip(table, pairs, strict=True):
        arrivals.setdefault((message.target, message.source), []).append(
            (place[target], place[source])
        )
    # By (rank, peer): positions at which something arrives, with how far the peer had come.
    steps: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for pair, items in arrivals.items():
        at: list[int] = []
        reached: list[int] = []
        for position, origin in sorted(items):
            if not reached or origin > reached[-1]:
                at.append(position)
                reached.append(origin)
        steps[pair] = (at, reached)
    waits: dict[tuple[int, int], list[int]] = {}
    for number, (message, (_, target)) in enumerate(zip(table, pairs, strict=True)):
        at, reached = steps.get((message.source, message.target), ([], []))
        found = bisect_left(reached, place[target])
        if found < len(at):
            waits.setdefault((message.source, at[found]), []).append(number)
        else:
            waits.setdefault((message.source, lengths[message.source]), []).append(number)
    return waits
