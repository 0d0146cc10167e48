"""Emulation: the real messages of a plan, with its computation replaced by the planned times.

Two clocks. The *virtual* clock is carried in the messages and follows the channel model of
:mod:`graphpipe.plan.ordered` to the nanosecond: no rank knows more than its own clocks and
the times in the messages that it receives, so that agreement with the simulator means that
simulator and runtime have the same idea of a plan. The *sleep* clock is the wall clock,
stretched: ranks sleep for the duration of their tasks, and a message can be used when the
channel model says that its last byte has arrived.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from graphpipe.plan.actions import ActionLists, build_actions
from graphpipe.plan.plan import Plan
from graphpipe.plan.problem import problem_of
from graphpipe.plan.schedule import Task
from graphpipe.plan.task_graph import TaskGraph
from graphpipe.runtime.executor import TaskRecord
from graphpipe.runtime.gather import gather_records
from graphpipe.runtime.launch import launch
from graphpipe.runtime.process_group import ProcessGroupTransport
from graphpipe.runtime.transport import (
    Eventually,
    Handle,
    InProcess,
    Lane,
    Transport,
    run_together,
    wait,
)
from graphpipe.simulate.timeline import Event, Timeline

Clock = Literal["virtual", "sleep"]
SHORTEST_TASK_NS = 20_000_000
"""Under the sleep clock the shortest task takes this long: 20 ms."""


@dataclass(frozen=True)
class EmulationOptions:
    """``clock`` as in the module's docstring; ``stretch``: factor on all times under ``sleep``;
    ``iterations``: how many in a row, of which the last is returned."""

    clock: Clock = "virtual"
    stretch: float = 1.0
    iterations: int = 1


def emulate(
    plan: Plan,
    *,
    clock: Clock = "virtual",
    processes: bool = True,
    stretch: float | None = None,
    iterations: int = 1,
    timeout: float = 600.0,
) -> Timeline:
    """Runs a plan's messages on this machine and returns when everything happened.

    Args:
        plan: A valid plan with times; its model is not needed.
        clock: ``virtual`` (exact, as fast as the messages) or ``sleep``.
        processes: One process a rank over gloo; False: all ranks in this process, which only
            the virtual clock allows.
        stretch: Under ``sleep``, factor on all times; by default such that the shortest task
            takes 20 ms. The timeline is in unstretched times.
        iterations: Iterations to run.
        timeout: Seconds after which a message without progress is a failure.
    """
    if stretch is None:
        shortest = min(
            (ns for graph in _graphs(plan) for ns in graph.duration if ns), default=SHORTEST_TASK_NS
        )
        stretch = SHORTEST_TASK_NS / shortest
    options = EmulationOptions(clock, stretch, iterations)
    if processes:
        results = launch(_emulate_here, plan.world_size, (plan, options, timeout), timeout=timeout)
        records: list[tuple[int, TaskRecord]] = results[0]
    else:
        assert clock == "virtual", "ranks in one process cannot sleep at the same time"
        transport = InProcess(plan.world_size)
        actions = build_actions(plan)
        programs = [
            _program(rank, plan, actions, transport, options) for rank in range(plan.world_size)
        ]
        records = run_together(transport, programs)[0]  # type: ignore[assignment]
    return _timeline(plan, records)


def _emulate_here(
    plan: Plan, options: EmulationOptions, timeout: float
) -> list[tuple[int, TaskRecord]]:
    """The emulation of this process's rank."""
    groups: list[tuple[Lane, tuple[int, ...]]] = [
        ("gradient", group.ranks) for group in plan.reduce_groups
    ]
    transport = ProcessGroupTransport(groups, timeout)
    program = _program(transport.rank, plan, build_actions(plan), transport, options)
    try:
        while True:
            next(program)
    except StopIteration as stop:
        records: list[tuple[int, TaskRecord]] = stop.value
        return records


def _graphs(plan: Plan) -> list[TaskGraph]:
    return [TaskGraph(problem_of(plan, copy)[0], bounded=False) for copy in range(plan.copies)]


def _program(
    rank: int,
    plan: Plan,
    actions: ActionLists,
    transport: Transport,
    options: EmulationOptions,
) -> Eventually[list[tuple[int, TaskRecord]]]:
    durations = _durations(plan, rank)
    emulator = _Emulator(rank, plan, actions, transport, options, durations)
    records: list[TaskRecord] = []
    end = 0
    for _ in range(options.iterations):
        records = yield from emulator.iteration()
        end = max((record.end_ns for record in records), default=0)
    gathered = yield from gather_records(rank, transport, records, 0, end)
    return gathered


def _durations(plan: Plan, rank: int) -> dict[Task, int]:
    """Nanoseconds of every task of a rank."""
    out: dict[Task, int] = {}
    for graph in _graphs(plan):
        for number in range(graph.count):
            if graph.rank[number] == rank:
                out[graph.task(number)] = graph.duration[number]
    return out


class _Emulator:
    """One rank. ``device`` and ``card`` are the clocks of the channel model, in nanoseconds
    (under ``sleep``: stretched, since the start of the iteration)."""

    def __init__(
        self,
        rank: int,
        plan: Plan,
        actions: ActionLists,
        transport: Transport,
        options: EmulationOptions,
        durations: dict[Task, int],
    ) -> None:
        self._rank = rank
        self._plan = plan
        self._actions = actions
        self._transport = transport
        self._sleeps = options.clock == "sleep"
        self._stretch = options.stretch if self._sleeps else 1
        self._durations = durations

    def iteration(self) -> Eventually[list[TaskRecord]]:
        """Runs the action list once; returns when its tasks, all-reduces and the optimizer
        ran, in unstretched nanoseconds."""
        zero = yield from self._start_together()
        device = card = 0
        ready = 0
        records: list[TaskRecord] = []
        under_way: dict[int, tuple[Handle, torch.Tensor]] = {}
        line, table = self._actions.lines[self._rank], self._actions.messages
        for kind, task, number in line:
            if kind == "recv":
                into = torch.zeros(1, dtype=torch.int64)
                source = table[number].source
                handle = self._transport.receive(source, self._rank, into, number)
                under_way[number] = (handle, into)
            elif kind == "wait_recv":
                handle, into = under_way.pop(number)
                yield from wait(handle)
                ready = max(ready, int(into))
            elif kind == "wait_send":
                yield from wait(under_way.pop(number)[0])
            elif kind == "run":
                start = max(device, ready)
                device = start + self._scaled(self._durations[task])
                if self._sleeps:
                    # What the machine adds (a late wake-up, a late message) counts.
                    start = max(start, time.monotonic_ns() - zero)
                    device = start + self._scaled(self._durations[task])
                    _sleep_until(zero + device)
                ready = 0
                records.append(TaskRecord(task.kind, task.stage, task.micro_batch, start, device))
            else:
                message = table[number]
                cluster = self._plan.cluster
                pair = (self._rank, message.target)
                card = max(card, device) + self._scaled(cluster.transfer_ns(*pair, message.nbytes))
                arrival = card + self._scaled(cluster.latency_ns(*pair))
                value = torch.tensor([arrival], dtype=torch.int64)
                handle = self._transport.send(self._rank, message.target, value, number)
                under_way[number] = (handle, value)
        yield from self._after(device, card, zero, records)
        return [self._unstretched(record) for record in records]

    def _after(
        self, device: int, card: int, zero: int, records: list[TaskRecord]
    ) -> Eventually[None]:
        """Parameter all-reduces in plan order, then the optimizer."""
        now = device
        for group in self._plan.reduce_groups:
            if self._rank not in group.ranks:
                continue
            now = max(now, card)
            together = torch.tensor([now], dtype=torch.int64)
            yield from wait(
                self._transport.all_reduce(
                    self._rank, group.ranks, together, "max", lane="gradient"
                )
            )
            start = int(together)
            seconds = self._plan.cluster.all_reduce_seconds(group.ranks, group.nbytes)
            now = start + self._scaled(round(seconds * 1e9))
            records.append(TaskRecord("all_reduce", -1, -1, start, now))
        step = self._plan.optimizer_ns[self._rank] if self._plan.optimizer_ns else 0
        if step:
            records.append(TaskRecord("optimizer", -1, -1, now, now + self._scaled(step)))
            now += self._scaled(step)
        if self._sleeps:
            _sleep_until(zero + now)

    def _scaled(self, nanoseconds: int) -> int:
        return round(nanoseconds * self._stretch) if self._sleeps else nanoseconds

    def _unstretched(self, record: TaskRecord) -> TaskRecord:
        if not self._sleeps:
            return record
        return TaskRecord(
            record.kind,
            record.stage,
            record.micro_batch,
            round(record.start_ns / self._stretch),
            round(record.end_ns / self._stretch),
        )

    def _start_together(self) -> Eventually[int]:
        """The wall clock's nanoseconds at which all ranks start (0 under the virtual clock)."""
        if not self._sleeps:
            return 0
        soon = torch.tensor([time.monotonic_ns() + 50_000_000], dtype=torch.int64)
        everyone = tuple(range(self._transport.world_size))
        yield from wait(self._transport.all_reduce(self._rank, everyone, soon, "max"))
        _sleep_until(int(soon))
        return int(soon)


def _sleep_until(when_ns: int) -> None:
    left = when_ns - time.monotonic_ns()
    if left > 0:
        time.sleep(left / 1e9)


def _timeline(plan: Plan, records: Sequence[tuple[int, TaskRecord]]) -> Timeline:
    events = tuple(
        Event(
            rank=rank,
            kind=record.kind,  # type: ignore[arg-type]
            start_ns=record.start_ns,
            end_ns=record.end_ns,
            stage=record.stage,
            micro_batch=record.micro_batch,
        )
        for rank, record in records
        if record.kind != "step"
    )
    return Timeline(
        world_size=plan.world_size,
        iteration_ns=max((event.end_ns for event in events), default=0),
        network="channel",
        events=events,
        stage_names=tuple(stage.name for stage in plan.stages),
    )
