"""The search among layouts in which stages share devices.

Every layout of :mod:`~graphpipe.planner.colocate` is started from its most promising shapes and
judged by scheduling its tasks; the best are refined by changing one number at a time. The
order of the tasks on a device is part of what is searched: free list scheduling with
backward-forward rounds, or the fixed order of interleaved 1F1B for the trunk with the tasks
of the branches slipped in where the trunk leaves gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graphpipe.errors import InfeasibleError, ScheduleError
from graphpipe.plan.assemble import assemble
from graphpipe.plan.builders.list_schedule import PRIORITIES
from graphpipe.plan.plan import Plan
from graphpipe.plan.problem import PipelineProblem
from graphpipe.plan.schedule import Priority
from graphpipe.plan.task_graph import TaskGraph
from graphpipe.planner.branches import splits
from graphpipe.planner.colocate import LAYOUTS, Ground, Shape, shapes
from graphpipe.planner.evaluate import delays
from graphpipe.planner.interleave import ROUND, TO_AND_FRO
from graphpipe.planner.reschedule import Timed, reschedule
from graphpipe.planner.seeds import Freedom, micro_batch_sizes
from graphpipe.planner.space import Space
from graphpipe.planner.stacked import Hosting
from graphpipe.simulate.predict import with_prediction

SHARED_BUDGET = 4000
"""What a search among shared devices may spend unless told otherwise: 1 for every 40 tasks
scheduled."""

_TASKS_PER_UNIT = 40
_TURNS = (1, 2, 3, 4, 6, 8)
_TILTS = (-0.06, -0.03, 0.03, 0.06)


class Judged(NamedTuple):
    """A shape with its schedule; ``lack`` is the largest of what its devices lack, bytes."""

    iteration_ns: int
    shape: Shape
    ground: Ground
    hosting: Hosting
    timed: Timed
    graph: TaskGraph
    lack: tuple[float, ...]

    @property
    def shape_key(self) -> tuple[object, ...]:
        """What breaks ties between shapes that take the same time."""
        return tuple(sorted(x) if isinstance(x, frozenset) else x for x in self.shape)

    @property
    def fits(self) -> bool:
        return max(self.lack) <= 0


@dataclass
class SharedSearch:
    """A search under way.

    Attributes:
        space: The search space.
        freedom: What may vary.
        layouts: Layouts of the branches to try.
        turns: Pieces of the trunk for each device to try.
        budget: How much to spend.
        target_ns: An iteration that must be beaten to be of interest.
        stop: Asked between candidates; True ends the search with what there is.
    """

    space: Space
    freedom: Freedom
    layouts: Sequence[str] = LAYOUTS
    turns: Sequence[int] = _TURNS
    budget: int = SHARED_BUDGET
    target_ns: float = float("inf")
    stop: Callable[[], bool] = lambda: False
    spent: int = 0
    scheduled: int = 0
    stopped: bool = False
    found: dict[tuple[Ground, Shape], Judged | None] = field(default_factory=dict)
    best: Judged | None = None

    def run(self) -> Judged | None:
        """Searches; None where nothing fits the memory."""
        if not applies(self.space, self.freedom):
            return None
        starts = self._starts()
        share = self.budget // 2 // max(1, len(starts))
        for items in starts.values():
            limit = self.spent + share
            leader: Judged | None = None
            for bound, ground, shape in items:
                if leader is not None and bound >= leader.iteration_ns:
                    break
                if self.best is not None and bound >= self.best.iteration_ns:
                    break
                if self.spent >= limit or not self._go_on():
                    break
                judged = self.judge(ground, shape)
                if judged is not None and (
                    leader is None or judged.iteration_ns < leader.iteration_ns
                ):
                    leader = judged
        self._refine()
        return self.best

    def _go_on(self) -> bool:
        if self.spent < self.budget and self.stop():
            self.stopped = True
        return self.spent < self.budget and not self.stopped

    def _starts(self) -> dict[str, list[tuple[float, Ground, Shape]]]:
        """By layout its most promising shapes, those with the least bound first."""
        guessed: dict[str, list[tuple[float, int, Ground, Shape]]] = {}
        turns = [count for count in self.turns if count <= 4]
        for number, ground in enumerate(grounds(self.space)):
            for shape in shapes(ground, self.freedom, self.layouts, turns):
                guess = ground.guess_ns(shape)
                if guess < self.target_ns:
                    guessed.setdefault(shape.layout, []).append((guess, number, ground, shape))
        out: dict[str, list[tuple[float, Ground, Shape]]] = {}
        for layout, items in guessed.items():
            items.sort(key=lambda item: item[:2])
            ranked = []
            for _, number, ground, shape in items[:_STARTS]:
                if self.freedom.recompute is True:
                    shape = shape._replace(recompute=_EVERY)
                bound = self._bound(ground, shape)
                if bound is not None and bound < self.target_ns:
                    ranked.append((bound, number, ground, shape))
            ranked.sort(key=lambda item: item[:2])
            out[layout] = [(bound, ground, shape) for bound, _, ground, shape in ranked]
        return out

    def _bound(self, ground: Ground, shape: Shape) -> float | None:
        """The bound of a shape, with the recomputation that its in-flight bounds ask for."""
        hosting = ground.hosting(shape)
        if hosting is None:
            return None
        if self.freedom.recompute == "auto":
            lack = hosting.lacking(hosting.need_bytes)
            if max(lack) > 0:
                flags = more_recomputation(hosting, lack)
                hosting = ground.hosting(shape._replace(recompute=flags))
                if hosting is None:
                    return None
        return hosting.bound_ns

    def judge(self, ground: Ground, shape: Shape) -> Judged | None:
        """Schedules a shape (once); recomputes where memory asks for it."""
        key = (ground, shape)
        if key in self.found:
            return self.found[key]
        self.found[key] = None
        judged = self._schedule(ground, shape)
        for _ in range(3):
            if judged is None or judged.fits or self.freedom.recompute != "auto":
                break
            flags = more_recomputation(judged.hosting, judged.lack)
            if flags == judged.shape.recompute:
                break
            judged = self._schedule(ground, judged.shape._replace(recompute=flags))
        if judged is None or not judged.fits:
            return None
        self.found[key] = self.found[ground, judged.shape] = judged
        if self.best is None or judged.iteration_ns < self.best.iteration_ns:
            self.best = judged
        return judged

    def _schedule(
        self, ground: Ground, shape: Shape, rounds: int = 1, priority: Priority = "sample"
    ) -> Judged | None:
        hosting = ground.hosting(shape)
        if hosting is None:
            return None
        result = scheduled(hosting, rounds, priority)
        if result is None:
            self.spent += 1
            return None
        timed, graph = result
        self.scheduled += 1
        self.spent += max(1, graph.count // _TASKS_PER_UNIT)
        lack = tuple(hosting.lacking(hosting.peak_bytes(graph, timed.lines)))
        return Judged(timed.finish_ns, shape, ground, hosting, timed, graph, lack)

    def _refine(self) -> None:
        """Changes one number of the best shapes at a time while that helps."""
        tried: set[tuple[Ground, Shape]] = set()
        while self.best is not None and self._go_on():
            fresh = [
                judged
                for judged in self._kept()
                if (judged.ground, judged.shape) not in tried
                and judged.iteration_ns <= _CLOSE * self.best.iteration_ns
            ]
            if not fresh:
                return
            start = fresh[0]
            tried.add((start.ground, start.shape))
            before = self.best
            for shape in self._promising(start):
                if not self._go_on():
                    return
                self.judge(start.ground, shape)
                if self.best is not before:
                    break

    def _kept(self) -> list[Judged]:
        """What was judged and fits, the best first."""
        pool = {id(j): j for j in self.found.values() if j is not None}.values()
        return sorted(pool, key=lambda j: (j.iteration_ns, j.shape_key))

    def _promising(self, start: Judged) -> list[Shape]:
        """Neighbours that are legal and whose bound is below the best, best bounds first."""
        assert self.best is not None
        ranked = []
        for number, shape in enumerate(self._neighbours(start.shape)):
            if (start.ground, shape) in self.found or not self._allowed(shape):
                continue
            bound = self._bound(start.ground, shape)
            if bound is not None and bound < self.best.iteration_ns:
                ranked.append((bound, number, shape))
        return [shape for _, _, shape in sorted(ranked, key=lambda item: item[:2])]

    def _allowed(self, shape: Shape) -> bool:
        """Whether the user's choices allow the sizes of replicated stages."""
        most = max(self.freedom.replicas)
        if shape.layout == "everywhere":
            return most > 1
        return shape.helpers <= min(most, shape.devices - 1)

    def _neighbours(self, shape: Shape) -> Iterator[Shape]:
        samples = self.space.samples(shape.copies)
        sizes = list(self.freedom.micro_batches or micro_batch_sizes(samples))
        if shape.recompute and self.freedom.recompute == "auto":
            yield shape._replace(recompute=frozenset())
            for s in sorted(shape.recompute):
                yield shape._replace(recompute=shape.recompute - {s})
        for share in (0.0, 0.25, 0.5, 1.0):
            yield shape._replace(depth_share=share)
        for change in (-1, 1):
            yield shape._replace(slack=max(0, shape.slack + change))
            yield shape._replace(branch_slack=shape.branch_slack + change)
            if shape.fixed_order:
                yield shape._replace(extra=shape.extra + change)
                yield shape._replace(extra=shape.extra + 3 * change)
            for size in _next_to(sizes, shape.batch, change):
                same = shape.branch_batch == shape.batch
                yield shape._replace(batch=size, branch_batch=size if same else shape.branch_batch)
            if shape.layout != "chain":
                for size in _next_to(sizes, shape.branch_batch, change):
                    yield shape._replace(branch_batch=size)
            if shape.helpers:
                yield shape._replace(helpers=max(1, shape.helpers + change))
            for turns in _next_to(self.turns, shape.turns, change):
                yield shape._replace(turns=turns)
        yield shape._replace(way=TO_AND_FRO if shape.way == ROUND else ROUND, fixed_order=False)
        yield shape._replace(fixed_order=not shape.fixed_order, way=ROUND)
        for tilt in _TILTS:
            yield shape._replace(tilt=round(shape.tilt + tilt, 3))
        for layout in self.layouts:
            if layout != shape.layout:
                helpers = max(1, shape.devices // 4) if layout in ("few", "apart") else 0
                size = shape.batch if layout == "chain" else shape.branch_batch
                yield shape._replace(layout=layout, helpers=helpers, branch_batch=size)

    def finalists(self) -> list[Judged]:
        """The best of each layout, the best first, scheduled with more effort."""
        out: list[Judged] = []
        seen: dict[tuple[str, int], int] = {}
        for judged in self._kept():
            kind = (judged.shape.layout, judged.shape.copies)
            if seen.get(kind, 0) < 2:
                seen[kind] = seen.get(kind, 0) + 1
                more = [
                    self._schedule(judged.ground, judged.shape, rounds=3, priority=priority)
                    for priority in PRIORITIES
                ]
                fitting = [item for item in more if item is not None and item.fits]
                out.append(min([judged, *fitting], key=lambda j: j.iteration_ns))
            if len(out) == _FINALISTS:
                break
        return sorted(out, key=lambda j: (j.iteration_ns, j.shape_key))

    def realise(self, judged: Judged, notes: Sequence[str], bound_ns: int) -> Plan | None:
        """A judged shape as a plan that fits at its peak; None if there is none.

        What a schedule holds is estimated without messages under way: where they make it too
        much, the shape is judged again with so much less room.
        """
        margin = self.space.margin
        try:
            for _ in range(3):
                made = assembled(self.space, judged, notes, bound_ns)
                if made is None or made.prediction is None:
                    return None
                peaks = made.prediction.peak_memory
                over = max(p - room for p, room in zip(peaks, self.space.memory, strict=True))
                if over <= 0:
                    return made
                self.space.margin += over
                self.found.pop((judged.ground, judged.shape), None)
                again = self.judge(judged.ground, judged.shape)
                if again is None:
                    return None
                judged = again
        finally:
            self.space.margin = margin
        return None


_EVERY = frozenset(range(1 << 12))
_CLOSE = 1.1
"""Shapes that take at most so many times the best are refined."""
_NEAR = 1.03
"""A plan at most so many times its lower bound is left alone."""
_TRUNK = 0.8
"""Share of the work on the longest path from which on a model without branches is a trunk."""
_FINALISTS = 6
_STARTS = 60


def applies(space: Space, freedom: Freedom) -> bool:
    """Whether there is something to share: several devices of one kind, nothing pinned, no loss
    over the whole mini-batch, and a model with branches before a trunk, or a trunk alone."""
    possible = (
        len(space.kinds) == 1
        and not space.pin
        and freedom.parts is None
        and not space.any_whole
        and space.cluster.world_size > 1
    )
    if not possible:
        return False
    ground = grounds(space)[0]
    if ground.split.branches:
        return True
    work = ground.work(1, 1)
    ends: list[float] = []
    for u, sources in enumerate(space.units.predecessors):
        ends.append(max((ends[s] for s in sources), default=0.0) + work[u])
    return max(ends) >= _TRUNK * sum(work)


def grounds(space: Space) -> list[Ground]:
    """The ways to tell trunk from branches that are searched, at most two."""
    typical = max(1, space.batch_size // (4 * space.cluster.world_size))
    forward, backward = space.units.times(space.kinds[0], typical)
    work = [float(f + b) for f, b in zip(forward, backward, strict=True)]
    return [Ground(space, split) for split in splits(space.units, work)[:2]]


def _next_to(values: Sequence[int], value: int, change: int) -> list[int]:
    """The next larger, or smaller, of some values; none at the end."""
    if change > 0:
        larger = [v for v in values if v > value]
        return [min(larger)] if larger else []
    smaller = [v for v in values if v < value]
    return [max(smaller)] if smaller else []


def scheduled(
    hosting: Hosting, rounds: int, priority: Priority = "sample"
) -> tuple[Timed, TaskGraph] | None:
    """Schedules one copy.

    Args:
        hosting: The candidate in numbers.
        rounds: Backward-forward rounds.
        priority: Of the first pass.

    Returns:
        Lists by rank of the cluster, and the tasks; None if the bounds deadlock.
    """
    space = hosting.space
    problem = hosting.problem()
    waits = delays(space, problem, far=hosting.candidate.far)
    number = {ranks[0]: slot for slot, ranks in enumerate(hosting.slots)}
    small = PipelineProblem(
        tuple(
            stage._replace(devices=tuple(number[rank] for rank in stage.devices))
            for stage in problem.stages
        ),
        problem.edges,
        problem.samples,
        len(number),
    )
    order = hosting.order(TaskGraph(small, bounded=False)) if hosting.candidate.trunk else ()
    after = [round(value) for value in hosting.after_ns]
    found = reschedule(small, waits, after, rounds, order=order, priority=priority)
    if found is None:
        return None
    timed, graph = found
    lines: list[list[int]] = [[] for _ in range(space.cluster.world_size)]
    for rank, slot in number.items():
        lines[rank] = timed.lines[slot]
    return timed._replace(lines=lines), graph


def more_recomputation(hosting: Hosting, lack: Sequence[float]) -> frozenset[int]:
    """Stages that recompute already and those that save what each device lacks, at the least
    extra time for the bytes saved."""
    stages = hosting.candidate.stages
    before = {s for s, stage in enumerate(stages) if stage.recompute}
    flags = set(before)
    for slot, left in enumerate(lack):
        left -= sum(hosting.saving(s) for s in flags - before if slot in stages[s].slots)
        if left <= 0:
            continue
        ranked = sorted(
            (hosting.recompute_ns(s) / hosting.saving(s), s)
            for s, stage in enumerate(stages)
            if slot in stage.slots and s not in flags and hosting.saving(s) > 0
        )
        for _, s in ranked:
            if left <= 0:
                break
            flags.add(s)
            left -= hosting.saving(s)
    return frozenset(flags)


def better(
    space: Space,
    freedom: Freedom,
    than: Plan | None,
    *,
    layouts: Sequence[str] = LAYOUTS,
    turns: Sequence[int] = _TURNS,
    budget: int = SHARED_BUDGET,
    stop: Callable[[], bool] = lambda: False,
    notes: Sequence[str] = (),
) -> Plan | None:
    """A plan with shared devices that is faster than another one, if the search finds one.

    Models without a trunk (see :func:`applies`), and plans close to their lower bound, are left
    as they are.

    Args:
        space: The search space.
        freedom: What may vary.
        than: The plan to beat; None takes the best that there is.
        layouts: Layouts of branches to try.
        turns: Pieces of the trunk for each device to try.
        budget: How much to spend.
        stop: Asked between candidates.
        notes: Remarks for the user.
    """
    target = float("inf")
    bound = 0
    if than is not None and than.prediction is not None:
        target, bound = float(than.prediction.iteration_ns), than.prediction.lower_bound_ns
        if target <= bound * _NEAR:
            return None
    search = SharedSearch(
        space, freedom, layouts, turns, budget=budget, target_ns=target, stop=stop
    )
    if search.run() is None:
        return None
    if search.stopped:
        notes = (*notes, "The search among shared devices was stopped at its time limit.")
    best: Plan | None = None
    for judged in search.finalists():
        if judged.iteration_ns >= target:
            break
        made = search.realise(judged, notes, bound)
        if made is None or made.prediction is None or made.prediction.iteration_ns >= target:
            continue
        best, target = made, float(made.prediction.iteration_ns)
    return best


def assembled(space: Space, judged: Judged, notes: Sequence[str], bound_ns: int) -> Plan | None:
    """A judged shape as a plan with its prediction; None where no plan can be made of it.

    The in-flight bounds of the plan are what the schedule keeps to.
    """
    hosting = judged.hosting
    problem = hosting.problem()
    kept = hosting.kept_bounds(judged.graph, judged.timed.lines)
    tight = [s._replace(in_flight=w) for s, w in zip(problem.stages, kept, strict=True)]
    for stages in (tight, problem.stages):
        try:
            return with_prediction(
                assemble(
                    space.units.graph,
                    space.units.costs,
                    space.cluster,
                    hosting.choices(stages),
                    batch_size=space.batch_size,
                    copies=hosting.candidate.copies,
                    lines=judged.graph.tasks(judged.timed.lines),
                    planner="gpp",
                    notes=tuple(notes),
                ),
                lower_bound_ns=bound_ns,
            )
        except ScheduleError:  # tight bounds may hold back what passes without a gradient
            continue
        except InfeasibleError:
            return None
    return None
