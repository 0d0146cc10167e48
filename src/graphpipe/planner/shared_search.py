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
from graphpipe.plan.plan import Plan
from graphpipe.plan.problem import PipelineProblem
from graphpipe.plan.task_graph import TaskGraph
from graphpipe.planner.branches import Split, splits
from graphpipe.planner.colocate import LAYOUTS, Shape, build, shapes
from graphpipe.planner.evaluate import delays
from graphpipe.planner.interleave import ROUND, TO_AND_FRO
from graphpipe.planner.reschedule import Timed, reschedule
from graphpipe.planner.seeds import Freedom, micro_batch_sizes
from graphpipe.planner.space import Space
from graphpipe.planner.stacked import Hosting, Stacked
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
    split: Split
    candidate: Stacked
    timed: Timed
    graph: TaskGraph
    lack: tuple[float, ...]

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
    stopped: bool = False
    found: dict[tuple[Split, Shape], Judged | None] = field(default_factory=dict)
    best: Judged | None = None

    def run(self) -> Judged | None:
        """Searches; None where nothing fits the memory."""
        if not applies(self.space, self.freedom):
            return None
        starts = self._starts()
        share = self.budget // 2 // max(1, len(starts))
        for layout, items in starts.items():
            limit = self.spent + share
            leader: Judged | None = None
            for bound, split, shape in items:
                if leader is not None and bound >= leader.iteration_ns:
                    break
                if self.best is not None and bound >= self.best.iteration_ns:
                    break
                if self.spent >= limit or not self._go_on():
                    break
                judged = self._judge(split, shape)
                if judged is not None and (
                    leader is None or judged.iteration_ns < leader.iteration_ns
                ):
                    leader = judged
            del layout
        self._refine()
        return self.best

    def _go_on(self) -> bool:
        if self.spent < self.budget and self.stop():
            self.stopped = True
        return self.spent < self.budget and not self.stopped

    def _starts(self) -> dict[str, list[tuple[float, Split, Shape]]]:
        """By layout its shapes, those with the least bound first."""
        out: dict[str, list[tuple[float, Split, Shape]]] = {}
        for split in _splits(self.space):
            for shape in shapes(
                self.space, self.freedom, split, self.layouts, [t for t in self.turns if t <= 4]
            ):
                if self.freedom.recompute is True:
                    shape = shape._replace(recompute=frozenset(range(10_000)))
                candidate = build(self.space, split, shape)
                if candidate is None:
                    continue
                hosting = Hosting(self.space, candidate)
                if hosting.times is None or not hosting.static_fits:
                    continue
                if hosting.bound_ns < self.target_ns:
                    out.setdefault(shape.layout, []).append((hosting.bound_ns, split, shape))
        for items in out.values():
            items.sort()
        return out

    def _judge(self, split: Split, shape: Shape) -> Judged | None:
        """Schedules a shape (once); recomputes where memory asks for it."""
        key = (split, shape)
        if key in self.found:
            return self.found[key]
        self.found[key] = None
        judged = self._schedule(split, shape)
        for _ in range(3):
            if judged is None or judged.fits or self.freedom.recompute != "auto":
                break
            flags = _more_recomputation(self.space, judged)
            if flags == judged.shape.recompute:
                break
            judged = self._schedule(split, judged.shape._replace(recompute=flags))
        if judged is None or not judged.fits:
            return None
        self.found[key] = self.found[split, judged.shape] = judged
        if self.best is None or judged.iteration_ns < self.best.iteration_ns:
            self.best = judged
        return judged

    def _schedule(self, split: Split, shape: Shape, rounds: int = 1) -> Judged | None:
        candidate = build(self.space, split, shape)
        if candidate is None:
            return None
        hosting = Hosting(self.space, candidate)
        if hosting.times is None or not hosting.static_fits:
            return None
        result = scheduled(hosting, rounds)
        if result is None:
            self.spent += 1
            return None
        timed, graph = result
        self.spent += max(1, graph.count // _TASKS_PER_UNIT)
        peak = hosting.peak_bytes(graph, timed.lines)
        lack = tuple(hosting.lacking(peak))
        return Judged(timed.finish_ns, shape, split, candidate, timed, graph, lack)

    def _refine(self) -> None:
        """Changes one number of the best shapes at a time while that helps."""
        tried: set[tuple[Split, Shape]] = set()
        while self.best is not None and self._go_on():
            pool = sorted(
                {id(j): j for j in self.found.values() if j is not None}.values(),
                key=lambda j: (j.iteration_ns, j.shape),
            )[:_POOL]
            fresh = [j for j in pool if (j.split, j.shape) not in tried]
            if not fresh:
                return
            start = fresh[0]
            tried.add((start.split, start.shape))
            before = self.best
            for shape in self._promising(start):
                if not self._go_on():
                    return
                self._judge(start.split, shape)
                if self.best is not before:
                    break

    def _promising(self, start: Judged) -> list[Shape]:
        """Neighbours that are legal and whose bound is below the best, best bounds first."""
        assert self.best is not None
        ranked = []
        for number, shape in enumerate(self._neighbours(start.shape)):
            if (start.split, shape) in self.found:
                continue
            candidate = build(self.space, start.split, shape)
            if candidate is None:
                continue
            hosting = Hosting(self.space, candidate)
            if hosting.times is None or not hosting.static_fits:
                continue
            if hosting.bound_ns < self.best.iteration_ns:
                ranked.append((hosting.bound_ns, number, shape))
        return [shape for _, _, shape in sorted(ranked)]

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
                yield shape._replace(extra=max(0, shape.extra + change))
            for size in _next_to(sizes, shape.batch, change):
                same = shape.branch_batch == shape.batch
                yield shape._replace(
                    batch=size, branch_batch=size if same else shape.branch_batch
                )
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
        pool = {id(j): j for j in self.found.values() if j is not None}.values()
        for judged in sorted(pool, key=lambda j: (j.iteration_ns, j.shape)):
            kind = (judged.shape.layout, judged.shape.copies)
            if seen.get(kind, 0) < 2:
                seen[kind] = seen.get(kind, 0) + 1
                more = self._schedule(judged.split, judged.shape, rounds=3)
                better = more is not None and more.fits
                out.append(more if better and more is not None else judged)
            if len(out) == _FINALISTS:
                break
        return sorted(out, key=lambda j: (j.iteration_ns, j.shape))


_POOL = 4
_FINALISTS = 6


def applies(space: Space, freedom: Freedom) -> bool:
    """Whether there is anything to share: one kind of device, nothing pinned, several devices."""
    return (
        len(space.kinds) == 1
        and not space.pin
        and freedom.parts is None
        and not space.any_whole
        and space.cluster.world_size > 1
    )


def _splits(space: Space) -> list[Split]:
    typical = max(1, space.batch_size // (4 * space.cluster.world_size))
    forward, backward = space.units.times(space.kinds[0], typical)
    return splits(space.units, [float(f + b) for f, b in zip(forward, backward, strict=True)])[:2]


def _next_to(values: Sequence[int], value: int, change: int) -> list[int]:
    """The next larger, or smaller, of some values; none at the end."""
    if change > 0:
        larger = [v for v in values if v > value]
        return [min(larger)] if larger else []
    smaller = [v for v in values if v < value]
    return [max(smaller)] if smaller else []


def scheduled(hosting: Hosting, rounds: int) -> tuple[Timed, TaskGraph] | None:
    """Schedules one copy; lists by rank of the cluster. None if the bounds deadlock."""
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
    found = reschedule(small, waits, after, rounds, order=order)
    if found is None:
        return None
    timed, graph = found
    lines: list[list[int]] = [[] for _ in range(space.cluster.world_size)]
    for rank, slot in number.items():
        lines[rank] = timed.lines[slot]
    return timed._replace(lines=lines), graph


def _more_recomputation(space: Space, judged: Judged) -> frozenset[int]:
    """Flags that save what each device lacks, at the least extra time for the bytes saved."""
    hosting = Hosting(space, judged.candidate)
    flags = set(judged.shape.recompute) & set(range(len(judged.candidate.stages)))
    for slot, lack in enumerate(judged.lack):
        left = lack
        for s in flags - judged.shape.recompute:
            if slot in judged.candidate.stages[s].slots:
                left -= hosting.saving(s)
        ranked = sorted(
            (
                s
                for s, stage in enumerate(judged.candidate.stages)
                if slot in stage.slots and s not in flags and hosting.saving(s) > 0
            ),
            key=lambda s: (hosting.recompute_ns(s) / hosting.saving(s), s),
        )
        for s in ranked:
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
    search = SharedSearch(
        space, freedom, layouts, turns, budget=budget, target_ns=target, stop=stop
    )
    if search.run() is None:
        return None
    best: Plan | None = None
    for judged in search.finalists():
        if judged.iteration_ns >= target:
            break
        made = realised(space, judged, notes, bound)
        if made is not None and made.prediction is not None:
            if made.prediction.iteration_ns < target:
                best, target = made, float(made.prediction.iteration_ns)
    return best


def realised(space: Space, judged: Judged, notes: Sequence[str], bound_ns: int) -> Plan | None:
    """A judged shape as a plan with its prediction; None if it exceeds the memory at its peak."""
    hosting = Hosting(space, judged.candidate)
    problem = hosting.problem()
    kept = hosting.kept_bounds(judged.graph, judged.timed.lines)
    tight = PipelineProblem(
        tuple(
            stage._replace(in_flight=bound)
            for stage, bound in zip(problem.stages, kept, strict=True)
        ),
        problem.edges,
        problem.samples,
        problem.world_size,
    )
    for bounds in (tight, problem):
        try:
            made = with_prediction(
                assemble(
                    space.units.graph,
                    space.units.costs,
                    space.cluster,
                    hosting.choices(bounds),
                    batch_size=space.batch_size,
                    copies=judged.candidate.copies,
                    lines=judged.graph.tasks(judged.timed.lines),
                    planner="gpp",
                    notes=tuple(notes),
                ),
                lower_bound_ns=bound_ns,
            )
        except ScheduleError:
            continue
        except InfeasibleError:
            return None
        assert made.prediction is not None
        if all(
            peak <= room
            for peak, room in zip(made.prediction.peak_memory, space.memory, strict=True)
        ):
            return made
        return None
    return None
