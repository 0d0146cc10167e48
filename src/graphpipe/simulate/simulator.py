"""``simulate``: a plan in, the timeline of one iteration out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from graphpipe.plan.messages import Message, messages
from graphpipe.plan.ordered import OrderedRun, run_ordered
from graphpipe.plan.problem import problem_of
from graphpipe.plan.ranges import SampleRange
from graphpipe.plan.reschedule import schedule_for
from graphpipe.plan.task_graph import TaskGraph
from graphpipe.simulate.light import Finish, finish
from graphpipe.simulate.memory import memory_curves, peaks
from graphpipe.simulate.shared import run_shared
from graphpipe.simulate.timeline import Event, Timeline, Transfer

if TYPE_CHECKING:
    from graphpipe.plan.plan import Plan


def simulate(
    plan: Plan,
    *,
    network: Literal["channel", "shared"] = "shared",
    batch_size: int | None = None,
    training: bool = True,
) -> Timeline:
    """One iteration of a plan in integer nanoseconds.

    Args:
        plan: A plan that passed its checks.
        network: ``shared`` lets messages under way share links and network cards, and is what
            plans are ranked by; ``channel`` is the model that a virtual clock reproduces
            exactly, see :mod:`graphpipe.plan.ordered`.
        batch_size: Samples of the mini-batch, by default the plan's; another size gets a
            schedule of its own.
        training: False for an evaluation: forwards only, no all-reduce, no optimizer.

    Returns:
        Tasks, transfers, all-reduces and optimizer steps, with the peaks of samples in flight
        (by stage, the largest of all copies) and of memory (by rank, bytes).

    Raises:
        ScheduleError: if the schedule deadlocks or names tasks that do not exist.
    """
    parts, owned, runs, finished = run_plan(
        plan, network=network, batch_size=batch_size, training=training
    )
    events = [*_tasks(parts, runs), *_finishes(finished)]
    timeline = Timeline(
        world_size=plan.world_size,
        iteration_ns=max(done.end_ns for done in finished),
        network=network,
        events=tuple(sorted(events, key=lambda e: (e.rank, e.start_ns, e.end_ns))),
        transfers=tuple(_transfers(parts, runs, owned)),
        peak_in_flight=peak_in_flight(parts, runs),
        stage_names=tuple(stage.name for stage in plan.stages),
    )
    curves = memory_curves(plan, timeline, batch_size=batch_size, training=training)
    return timeline.model_copy(update={"peak_memory": peaks(curves)})


Parts = list[tuple[TaskGraph, list[list[int]]]]
"""The tasks of each copy and their lists by rank."""


def run_plan(
    plan: Plan,
    *,
    network: Literal["channel", "shared"],
    batch_size: int | None = None,
    training: bool = True,
) -> tuple[Parts, list[SampleRange], list[OrderedRun], list[Finish]]:
    """Simulates a plan; see :func:`simulate`.

    Returns:
        By copy its tasks and lists, its samples, and its run; by rank what follows the tasks.
    """
    lines = schedule_for(plan, batch_size, training=training).tasks
    parts: Parts = []
    owned: list[SampleRange] = []
    for copy in range(plan.copies):
        problem, samples = problem_of(plan, copy, batch_size, training=training)
        ranks = {rank for stage in problem.stages for rank in stage.devices}
        graph = TaskGraph(problem, bounded=False)
        own = [line if rank in ranks else () for rank, line in enumerate(lines)]
        parts.append((graph, graph.numbers(own)))
        owned.append(samples)
    if network == "shared":
        runs = run_shared(parts, plan.cluster, record=True)
    else:
        runs = [run_ordered(*part, plan.cluster, record=True) for part in parts]
    groups = [(group.ranks, group.nbytes) for group in plan.reduce_groups] if training else []
    finished = finish(runs, plan.cluster, groups, plan.optimizer_ns if training else ())
    return parts, owned, runs, finished


def _tasks(parts: list[tuple[TaskGraph, list[list[int]]]], runs: list[OrderedRun]) -> list[Event]:
    out: list[Event] = []
    for (graph, lines), run in zip(parts, runs, strict=True):
        for rank, line in enumerate(lines):
            for number in line:
                task, end = graph.task(number), run.end[number]
                out.append(
                    Event(
                        rank=rank,
                        kind=task.kind,
                        start_ns=end - graph.duration[number],
                        end_ns=end,
                        stage=task.stage,
                        micro_batch=task.micro_batch,
                    )
                )
    return out


def _finishes(finished: list[Finish]) -> list[Event]:
    out: list[Event] = []
    for rank, done in enumerate(finished):
        out += [
            Event(rank=rank, kind="all_reduce", start_ns=start, end_ns=end)
            for start, end in done.reduces
        ]
        start, end = done.optimizer
        if end > start:
            out.append(Event(rank=rank, kind="optimizer", start_ns=start, end_ns=end))
    return out


def _transfers(
    parts: Parts,
    runs: list[OrderedRun],
    owned: list[SampleRange],
) -> list[Transfer]:
    """The messages with tensors, in order of their start."""
    out: list[Transfer] = []
    for (graph, _), run, samples in zip(parts, runs, owned, strict=True):
        by_tasks: dict[tuple[int, int], Message] = {}
        for message in messages(graph.problem, samples.start):
            ends = graph.backward if message.kind == "B" else graph.forward
            source = ends[message.source_stage] + message.source_micro_batch
            target = ends[message.target_stage] + message.target_micro_batch
            by_tasks[source, target] = message
        for sent in run.sent:
            message = by_tasks[sent.source, sent.target]
            if message.kind == "C":
                continue
            out.append(
                Transfer(
                    source=message.source,
                    target=message.target,
                    kind=message.kind,
                    edge=message.edge,
                    start_ns=sent.start_ns,
                    end_ns=sent.arrival_ns,
                    nbytes=message.nbytes,
                    first_sample=message.start,
                    last_sample=message.stop - 1,
                )
            )
    return sorted(out, key=lambda t: (t.start_ns, t.source, t.target, t.edge, t.first_sample))


def peak_in_flight(parts: Parts, runs: list[OrderedRun]) -> tuple[int, ...]:
    """Most samples in flight by stage. A stage without a backward holds a micro-batch until
    every consumer's forward of it has ended."""
    count = len(parts[0][0].problem.stages)
    most = [0] * count
    for (graph, _), run in zip(parts, runs, strict=True):
        for s, spec in enumerate(graph.problem.stages):
            consumers = {edge.target for edge in graph.problem.edges if edge.source == s}
            changes: list[tuple[int, int, int]] = []
            for i in range(graph.micro_batches[s]):
                task = graph.forward[s] + i
                samples = graph.samples_of(task)
                if spec.has_backward:
                    release = run.end[graph.backward[s] + i]
                else:
                    readers = (
                        run.end[t] for t in graph.successors[task] if graph.stage[t] in consumers
                    )
                    release = max(run.end[task], *readers, 0)
                # What ends at a moment makes room before what begins then, unless it took
                # no time at all.
                start = run.end[task] - graph.duration[task]
                if release > start:
                    changes += [(start, 1, samples), (release, 0, -samples)]
            held = 0
            for _, _, change in sorted(changes):
                held += change
                most[s] = max(most[s], held)
    return tuple(most)
