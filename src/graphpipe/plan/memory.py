"""Memory of every rank over an iteration, from its action list.

What is held follows from the order of a rank's actions alone, not from luck in timing:

- parameters, gradients and optimizer state, always, each parameter once;
- saved activations of a micro-batch, from its forward to the end of its backward;
- the buffer that a micro-batch's inputs (or gradients) arrive in, from the moment its first
  receive is posted, or its first part is made on the same rank, until its task starts (for
  gradients, and for stages without a backward: ends);
- gradients sent, and outputs sent by a stage without a backward, until the send is waited
  for; outputs of other stages are among what ``StageMemory.saved_per_micro_batch`` counts;
- workspace while a task runs, and what recomputation brings back while its backward runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from graphpipe.plan.actions import ActionLists, copy_actions
from graphpipe.plan.copies import alike_copies, ranks_of_copy
from graphpipe.plan.messages import overlaps, returns_gradient
from graphpipe.plan.problem import PipelineProblem, problem_of
from graphpipe.plan.schedule import Task

if TYPE_CHECKING:
    from graphpipe.plan.plan import Plan

_Buffer = tuple[str, int, int]
"""An arriving buffer: kind, edge, micro-batch of the receiving task."""

_Readers = dict[tuple[str, int], list[int]]
"""Edges whose buffers the tasks of a kind in a stage take."""


class Step(NamedTuple):
    """``held`` bytes from this point of a rank's list on: when ``task`` starts, when it ends,
    or (``between``) after the end of the task that was last; None before the first."""

    task: Task | None
    phase: Literal["start", "end", "between"]
    held: int


def memory_steps(
    plan: Plan, lists: ActionLists, batch_size: int | None = None, *, training: bool = True
) -> tuple[tuple[Step, ...], ...]:
    """Bytes held by each rank, step by step.

    Args:
        plan: The plan.
        lists: Its action lists for this mini-batch.
        batch_size: Samples of the mini-batch, by default the plan's.
        training: False for an evaluation.
    """
    out: list[tuple[Step, ...]] = [
        (Step(None, "between", plan.static_bytes(rank)),) for rank in range(plan.world_size)
    ]
    for copy in range(plan.copies):
        problem, _ = problem_of(plan, copy, batch_size, training=training)
        readers = _readers(problem)
        for rank in ranks_of_copy(plan, copy):
            out[rank] = _Walk(plan, problem, readers, rank).follow(lists)
    return tuple(out)


def peak_memory(plan: Plan) -> tuple[int, ...]:
    """The most bytes that each rank holds in a training step of the plan's own mini-batch,
    with receives posted as :func:`graphpipe.plan.actions.build_actions` does by default."""
    peaks = [plan.static_bytes(rank) for rank in range(plan.world_size)]
    for copies in alike_copies(plan):
        problem, _ = problem_of(plan, copies[0])
        readers = _readers(problem)
        lists = copy_actions(plan, copies[0], plan.schedule.tasks)
        ranks = [ranks_of_copy(plan, copy) for copy in copies]
        for same in zip(*ranks, strict=True):
            steps = _Walk(plan, problem, readers, same[0]).follow(lists)
            more = max(step.held for step in steps) - plan.static_bytes(same[0])
            for rank in same:
                peaks[rank] += more
    return tuple(peaks)


def _readers(problem: PipelineProblem) -> _Readers:
    readers: _Readers = {}
    for e, edge in enumerate(problem.edges):
        readers.setdefault(("F", edge.target), []).append(e)
        readers.setdefault(("B", edge.source), []).append(e)
    return readers


class _Walk:
    """One rank's way through its actions."""

    def __init__(
        self,
        plan: Plan,
        problem: PipelineProblem,
        readers: _Readers,
        rank: int,
    ) -> None:
        self.plan = plan
        self.problem = problem
        self.rank = rank
        self.held = plan.static_bytes(rank)
        self.last: Task | None = None
        self.steps: list[Step] = [Step(None, "between", self.held)]
        self.buffers: dict[_Buffer, int] = {}
        self.local = self._local_parts()
        self.reads = readers

    def _local_parts(self) -> dict[Task, list[_Buffer]]:
        """Buffers on this rank that each task of it fills a part of."""
        out: dict[Task, list[_Buffer]] = {}
        problem = self.problem
        for e, edge in enumerate(problem.edges):
            source, target = problem.stages[edge.source], problem.stages[edge.target]
            if self.rank not in source.devices or self.rank not in target.devices:
                continue
            back = returns_gradient(problem, e)
            pairs = overlaps(problem.samples, source.micro_batch, target.micro_batch)
            for i, j, _, _, first in pairs:
                here = source.devices[i % source.replicas]
                if not here == target.devices[j % target.replicas] == self.rank:
                    continue
                if edge.batched or first:
                    out.setdefault(Task("F", edge.source, i), []).append(("F", e, j))
                if back and (edge.gradient_batched or first):
                    out.setdefault(Task("B", edge.target, j), []).append(("B", e, i))
        return out

    def _change(self, delta: int, phase: Literal["start", "end", "between"] = "between") -> None:
        if delta:
            self.held += delta
            self.steps.append(Step(self.last, phase, self.held))

    def _samples(self, task: Task) -> int:
        size = self.problem.stages[task.stage].micro_batch
        return min(size, self.problem.samples - task.micro_batch * size)

    def _allocate(self, buffer: _Buffer) -> int:
        """Bytes that become held for a buffer: all of it at its first part."""
        if buffer in self.buffers:
            return 0
        kind, e, index = buffer
        edge = self.problem.edges[e]
        stage = edge.target if kind == "F" else edge.source
        count = self._samples(Task("F", stage, index))
        if kind == "F":
            nbytes = edge.forward_bytes * count + edge.forward_fixed
        else:
            nbytes = edge.backward_bytes * count + edge.backward_fixed
        self.buffers[buffer] = round(nbytes)
        return self.buffers[buffer]

    def _release(self, task: Task) -> int:
        """Bytes of the buffers that a task has taken."""
        return sum(
            self.buffers.pop((task.kind, e, task.micro_batch), 0)
            for e in self.reads.get((task.kind, task.stage), ())
        )

    def follow(self, lists: ActionLists) -> tuple[Step, ...]:
        """The steps of the rank."""
        for action in lists.lines[self.rank]:
            message = lists.messages[action.message] if action.message >= 0 else None
            if action.kind == "run":
                self._run(action.task)
            elif message is None or message.kind == "C":
                continue
            elif action.kind == "recv":
                self._change(
                    self._allocate((message.kind, message.edge, message.target_micro_batch))
                )
            elif action.kind in ("send", "wait_send"):
                keeps = self.problem.stages[message.source_stage].has_backward
                if message.kind == "B" or not keeps:
                    self._change(message.nbytes if action.kind == "send" else -message.nbytes)
        return tuple(self.steps)

    def _run(self, task: Task) -> None:
        spec = self.problem.stages[task.stage]
        memory = self.plan.stages[task.stage].memory
        share = self._samples(task) / spec.micro_batch
        saved = round(memory.saved_per_micro_batch * share)
        extra = round(memory.workspace * share)
        if task.kind == "B":
            extra += round(memory.recompute * share)
        self.last = task
        forward_keeps = task.kind == "F" and spec.has_backward
        self._change(extra + (saved - self._release(task) if forward_keeps else 0), "start")
        made = sum(self._allocate(buffer) for buffer in self.local.get(task, ()))
        self._change(made, "end")
        done = 0 if forward_keeps else self._release(task)
        self._change(-extra - done - (saved if task.kind == "B" else 0), "end")
