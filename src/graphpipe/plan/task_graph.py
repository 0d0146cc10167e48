"""``TaskGraph``: the tasks of one copy and what each must wait for, as flat lists.

Everything that orders, checks or times tasks works on it. Lists instead of objects,
because a planner makes thousands of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphpipe.errors import ScheduleError
from graphpipe.plan.messages import credits, overlaps, returns_gradient
from graphpipe.plan.problem import PipelineProblem
from graphpipe.plan.schedule import Task


class TaskGraph:
    """Tasks of a problem, numbered stage by stage: its forwards, then its backwards.

    Attributes:
        problem: The problem.
        count: Number of tasks.
        forward: ``forward[s] + i`` is the forward of micro-batch i in stage s.
        backward: ``backward[s] + i`` is its backward; -1 for a stage without backward.
        micro_batches: Micro-batches by stage.
        stage: Stage of every task.
        rank: Rank of every task.
        duration: Nanoseconds of every task; a short micro-batch takes its share.
        successors: For every task those that wait for it.
        missing: For every task the number of those that it waits for.
        bounded: Whether order within a stage's replica and the in-flight bounds are among
            the dependencies.
    """

    __slots__ = (
        "backward",
        "bounded",
        "count",
        "duration",
        "forward",
        "micro_batches",
        "missing",
        "problem",
        "rank",
        "stage",
        "successors",
    )

    def __init__(self, problem: PipelineProblem, *, bounded: bool) -> None:
        self.problem = problem
        self.bounded = bounded
        self.forward: list[int] = []
        self.backward: list[int] = []
        self.micro_batches: list[int] = []
        self.stage: list[int] = []
        self.rank: list[int] = []
        self.duration: list[int] = []
        samples = problem.samples
        count = 0
        for number, spec in enumerate(problem.stages):
            size = spec.micro_batch
            tasks = -(-samples // size)
            last = samples - (tasks - 1) * size
            self.micro_batches.append(tasks)
            self.forward.append(count)
            ranks = list(spec.devices) * -(-tasks // spec.replicas)
            del ranks[tasks:]
            self.rank += ranks
            self.duration += [spec.forward_ns] * tasks
            if tasks:
                self.duration[-1] = spec.forward_ns * last // size
            count += tasks
            if spec.has_backward:
                self.backward.append(count)
                self.rank += ranks
                self.duration += [spec.backward_ns] * tasks
                if tasks:
                    self.duration[-1] = spec.backward_ns * last // size
                count += tasks
            else:
                self.backward.append(-1)
            self.stage += [number] * (count - len(self.stage))
        self.count = count
        self.missing = [0] * count
        self.successors: list[list[int]] = [[] for _ in range(count)]
        self._add_data()
        self._add_own(bounded)

    def _add_data(self) -> None:
        """A forward waits for the forwards whose samples it reads, a backward for the
        backwards that return gradients for them, a held forward for its credits."""
        problem, successors, missing = self.problem, self.successors, self.missing
        stages = problem.stages
        for number, edge in enumerate(problem.edges):
            source, target = edge.source, edge.target
            here, there = self.forward[source], self.forward[target]
            back = returns_gradient(problem, number)
            back_here, back_there = self.backward[source], self.backward[target]
            if stages[source].micro_batch == stages[target].micro_batch:
                for i in range(self.micro_batches[source]):
                    successors[here + i].append(there + i)
                    missing[there + i] += 1
                if back:
                    for i in range(self.micro_batches[source]):
                        successors[back_there + i].append(back_here + i)
                        missing[back_here + i] += 1
                continue
            for i, j, _, _, first in overlaps(
                problem.samples, stages[source].micro_batch, stages[target].micro_batch
            ):
                if edge.batched or first:
                    successors[here + i].append(there + j)
                    missing[there + j] += 1
                if back and (edge.gradient_batched or first):
                    successors[back_there + j].append(back_here + i)
                    missing[back_here + i] += 1
        for credit in credits(problem):
            edge = problem.edges[credit.edge]
            holder = self.forward[edge.source] + credit.producer
            successors[self.forward[edge.target] + credit.consumer].append(holder)
            missing[holder] += 1

    def _add_own(self, bounded: bool) -> None:
        """A backward waits for its forward; if bounded, also the order within a replica, and
        the forward that would exceed the bound waits for the backward that makes room."""
        successors, missing = self.successors, self.missing
        for number, spec in enumerate(self.problem.stages):
            here, back = self.forward[number], self.backward[number]
            tasks, replicas = self.micro_batches[number], spec.replicas
            if back >= 0:
                for i in range(tasks):
                    successors[here + i].append(back + i)
                    missing[back + i] += 1
            if not bounded:
                continue
            starts = (here,) if back < 0 else (here, back)
            for start in starts:
                for i in range(start, start + tasks - replicas):
                    successors[i].append(i + replicas)
                    missing[i + replicas] += 1
            room = replicas * lane_bound(spec.in_flight, replicas, spec.micro_batch)
            if back >= 0:
                for i in range(room, tasks):
                    successors[back + i - room].append(here + i)
                    missing[here + i] += 1

    def task(self, number: int) -> Task:
        """The task with this number."""
        stage = self.stage[number]
        index = number - self.forward[stage]
        if index < self.micro_batches[stage]:
            return Task("F", stage, index)
        return Task("B", stage, index - self.micro_batches[stage])

    def number(self, task: Task) -> int:
        """The number of a task.

        Raises:
            ScheduleError: if the problem has no such task.
        """
        stages = self.problem.stages
        if 0 <= task.stage < len(stages) and 0 <= task.micro_batch < self.micro_batches[task.stage]:
            if task.kind == "F":
                return self.forward[task.stage] + task.micro_batch
            if stages[task.stage].has_backward:
                return self.backward[task.stage] + task.micro_batch
        raise ScheduleError(
            "The schedule holds a task that the plan does not have",
            where=str(task),
            expected=f"stages 0 to {len(stages) - 1}, micro-batches within the mini-batch, "
            "and backwards only where the stage has one",
        )

    def numbers(self, lines: Iterable[Iterable[Task]]) -> list[list[int]]:
        """Task lists as numbers."""
        return [[self.number(task) for task in line] for line in lines]

    def tasks(self, lines: Iterable[Sequence[int]]) -> list[list[Task]]:
        """Numbers as task lists."""
        return [[self.task(number) for number in line] for line in lines]

    def first_sample(self, number: int) -> int:
        """First sample of a task, numbered within the copy."""
        task = self.task(number)
        return task.micro_batch * self.problem.stages[task.stage].micro_batch

    def samples_of(self, number: int) -> int:
        """Samples of a task."""
        size = self.problem.stages[self.stage[number]].micro_batch
        return min(size, self.problem.samples - self.first_sample(number))


def lane_bound(in_flight: int, replicas: int, micro_batch: int) -> int:
    """Micro-batches that one replica may have in flight under W_s = ``in_flight``, at least 1."""
    return max(1, -(-in_flight // (replicas * micro_batch)))
