"""The search: start wide with the estimate, schedule the few that can still win, refine them.

1. Every point (copies, devices, placement, micro-batch size) has a bound; points are cut in
   the order of their bounds, first quickly, then the best of them in every order and family.
2. The best layouts by estimate are polished by moves of single units.
3. They are scheduled in the order of their estimates, until no estimate is below the best
   schedule; the winners are refined by moves that are judged by their schedule.

Everything is deterministic: the budget counts candidates, not seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

from graphpipe.planner.estimate import estimate
from graphpipe.planner.evaluate import Score, score
from graphpipe.planner.layout import Layout
from graphpipe.planner.refine import climb, every_move, moved, packed, polish, transfers
from graphpipe.planner.seeds import (
    Freedom,
    Orders,
    Plane,
    Seed,
    fitted,
    micro_batch_sizes,
    planes,
    seeds_at,
)
from graphpipe.planner.space import Space

Progress = Callable[[int, float], None]
"""Told (candidates judged, seconds of the best iteration) now and then."""


@dataclass
class Found:
    """A scheduled layout."""

    layout: Layout
    score: Score
    point: Plane

    @property
    def key(self) -> tuple[float, int, Layout]:
        return self.score.iteration_ns, len(self.layout.replicas), self.layout


@dataclass
class Search:
    """A search under way.

    Attributes:
        space: The search space.
        freedom: What may vary.
        budget: How much to judge: an estimate counts 1, a schedule 1 for every 40 tasks.
        stop: Asked between candidates; True ends the search with what there is.
        progress: Told (candidates judged, best iteration in seconds) now and then.
    """

    space: Space
    freedom: Freedom
    budget: int = 800
    stop: Callable[[], bool] = lambda: False
    progress: Progress | None = None
    judged: int = 0
    scheduled: int = 0
    stopped: bool = False
    best_lacking: Seed | None = None
    found: dict[Layout, Found] = field(default_factory=dict)
    best: Found | None = None

    def run(self) -> Found | None:
        """Searches; None where no layout fits the memory (see ``best_lacking``)."""
        starts = self._starts(tiny=False)
        if self.best_lacking is not None or not starts:
            starts = self._starts(tiny=True) or starts
        self._schedule(self._polish(starts))
        self._refine()
        self._challenge()
        if self.progress is not None and self.best is not None:
            self.progress(self.judged, self.best.score.iteration_ns / 1e9)
        return self.best

    def _challenge(self) -> None:
        """Lets a search of chains alone compete where chains come close: it gets further with
        the same budget, and what it finds must not be better than what we return."""
        if (
            self.best is None
            or self.stopped
            or not {"graph", "chain"} <= set(self.freedom.families)
        ):
            return
        rival = Search(
            self.space,
            self.freedom._replace(families=("chain",)),
            budget=self.budget,
            stop=self.stop,
            progress=self.progress,
        )
        starts = rival._starts(tiny=False)
        if not starts or starts[0].estimate.lacking > 0:
            return
        if starts[0].estimate.iteration_ns > _CLOSE * self.best.score.iteration_ns:
            return
        polished = rival._polish(starts)
        if not polished or polished[0].estimate.iteration_ns > (
            _CLOSE_POLISHED * self.best.score.iteration_ns
        ):
            return
        rival._schedule(polished)
        rival._refine()
        self.judged += rival.judged
        self.scheduled += rival.scheduled
        self.stopped = rival.stopped
        for layout, found in rival.found.items():
            self.found.setdefault(layout, found)
        if rival.best is not None and rival.best.key < self.best.key:
            self.best = rival.best

    def _go_on(self, cost: int = 1) -> bool:
        self.judged += cost
        if self.judged >= self.budget or self.stop():
            self.stopped = self.stopped or self.judged < self.budget
            return False
        if self.progress is not None and self.judged % 64 < cost:
            seconds = self.best.score.iteration_ns / 1e9 if self.best else float("inf")
            self.progress(self.judged, seconds)
        return True

    def _starts(self, *, tiny: bool) -> list[Seed]:
        space, freedom = self.space, self.freedom
        known = Orders(space)
        best = float("inf")
        ranked: list[tuple[bool, float, Plane]] = []
        for point in planes(space, freedom, tiny=tiny):
            if point.bound > best * _QUICK_TOLERANCE:
                break
            for seed in seeds_at(space, freedom, point, known, quick=True):
                lacking = seed.estimate.lacking > 0
                ranked.append((lacking, seed.estimate.iteration_ns, point))
                if not lacking:
                    best = min(best, seed.estimate.iteration_ns)
                if not self._go_on():
                    break
        ranked.sort()
        out: dict[Layout, Seed] = {}
        for _, value, point in ranked[:_POINTS]:
            if value > best * _QUICK_TOLERANCE and out:
                continue
            for seed in seeds_at(space, freedom, point, known, quick=False):
                out[seed.layout] = seed
                if not self._go_on():
                    break
        seeds = sorted(
            out.values(),
            key=lambda s: (s.estimate.lacking > 0, s.estimate.iteration_ns, s.layout),
        )
        self.best_lacking = None
        if seeds and seeds[0].estimate.lacking > 0:
            self.best_lacking = min(seeds, key=lambda s: (s.estimate.lacking, s.layout))
        return seeds

    def _polish(self, seeds: list[Seed]) -> list[Seed]:
        """Polishes the best seeds; no more than a few of one point, so that others have a turn."""
        out: dict[Layout, Seed] = {}
        per_point: dict[Plane, int] = {}
        for seed in seeds:
            if len(per_point) >= _POLISHED and seed.point not in per_point:
                continue
            turn = per_point.get(seed.point, 0)
            if turn >= _PER_POINT:
                continue
            per_point[seed.point] = turn + 1
            better = polish(self.space, seed, _POLISH_STEPS)
            out[seed.layout] = seed
            out[better.layout] = better
            if not self._go_on(4):
                break
        if max(self.freedom.replicas) > 1 and not self.freedom.parts:
            first = sorted(out.values(), key=lambda s: (s.estimate.iteration_ns, s.layout))
            first = [s for s in first if s.estimate.lacking <= 0]
            shared = [s for s in first if max(s.layout.replicas) > 1]
            for seed in dict.fromkeys([*first[:_CLIMBED], *shared[:_CLIMBED]]):
                higher, spent = climb(self.space, seed, self.freedom.replicas, _CLIMB_ROUNDS)
                better = polish(self.space, higher, _POLISH_STEPS)
                out[better.layout] = better
                out[higher.layout] = higher
                for resized in self._smaller(better):
                    out[resized.layout] = resized
                if not self._go_on(spent // 2):
                    break
        fitting = [s for s in out.values() if s.estimate.lacking <= 0]
        handy = [s for s in fitting if self._tasks(s.layout) <= _TOO_MANY_TASKS]
        return sorted(handy or fitting, key=lambda s: (s.estimate.iteration_ns, s.layout))

    def _smaller(self, seed: Seed) -> Iterator[Seed]:
        """The same parts with micro-batches of a half, a quarter and so on, while that helps."""
        layout = seed.layout
        while layout.micro_batch % 2 == 0 and not self.freedom.micro_batches:
            batch = layout.micro_batch // 2
            layout = layout._replace(
                micro_batch=batch,
                part_batch=tuple(max(1, b // 2) for b in layout.part_batch),
            )
            found = fitted(
                self.space, layout, seed.point._replace(batch=batch), self.freedom.recompute
            )
            self.judged += 1
            if found is None or found.estimate.iteration_ns >= seed.estimate.iteration_ns:
                return
            seed = found
            yield polish(self.space, seed, _POLISH_STEPS // 2)

    def _tasks(self, layout: Layout) -> int:
        """About how many tasks a copy has."""
        structure = self.space.structure(layout.assign, layout.merged)
        count = 0 if structure is None else len(structure.stages)
        return 2 * count * -(-self.space.samples(layout.copies) // layout.micro_batch)

    def _judge(self, layout: Layout, point: Plane, expected_ns: float) -> Found | None:
        """Schedules a layout (once), that the estimate expects to take so long, and keeps it if
        it is the best."""
        known = self.found.get(layout)
        if known is not None:
            return known
        result = score(
            self.space,
            layout,
            most_tasks=_MOST_TASKS,
            enough_ns=_GOOD_ENOUGH * expected_ns,
            hopeless_ns=_HOPELESS * self.best.score.iteration_ns if self.best else float("inf"),
        )
        self.scheduled += 1
        if result is None:
            return None
        self.judged += result.graph.count // _TASKS_PER_UNIT
        found = self.found[layout] = Found(layout, result, point)
        if self.best is None or found.key < self.best.key:
            self.best = found
        return found

    def exact(self, found: Found) -> Found:
        """The same layout, all of its tasks scheduled, with more effort."""
        rounds = 3 if found.score.exact and found.score.graph.count <= _MOST_TASKS else 1
        result = score(self.space, found.layout, rounds=rounds)
        assert result is not None
        return Found(found.layout, result, found.point)

    def _schedule(self, seeds: list[Seed]) -> None:
        """Schedules in the order of the estimates, simple layouts and intricate ones in turns (the
        estimates of intricate ones promise more than they keep); leaves out what cannot win."""
        simple: list[Seed] = []
        intricate: list[Seed] = []
        for seed in seeds:
            structure = self.space.structure(seed.layout.assign, seed.layout.merged)
            assert structure is not None
            few = len(structure.stages) <= 1.5 * len(seed.layout.replicas)
            (simple if few else intricate).append(seed)
        turns = [s for pair in zip_longest(simple, intricate) for s in pair if s is not None]
        for seed in turns:
            if self.best is not None and (
                seed.estimate.iteration_ns >= self.best.score.iteration_ns
            ):
                continue
            if not self._go_on() and self.best is not None:
                return
            found = self._judge(seed.layout, seed.point, seed.estimate.iteration_ns)
            if found is None:
                continue
            if found.score.iteration_ns > 1.002 * seed.estimate.iteration_ns:
                layout = seed.layout._replace(slack=seed.layout.slack + 1)
                if self._fits(layout):
                    self._judge(layout, seed.point, seed.estimate.iteration_ns)

    def _fits(self, layout: Layout) -> bool:
        value = estimate(self.space, layout)
        return value is not None and value.lacking <= 0

    def _refine(self) -> None:
        """Moves on the best schedules: other sizes, slack, recomputation, places."""
        tried: set[Layout] = set()
        while True:
            pool = sorted(self.found.values(), key=lambda f: f.key)[:_REFINED]
            fresh = [f for f in pool if f.layout not in tried]
            if not fresh or self.best is None:
                return
            start = fresh[0]
            tried.add(start.layout)
            before = self.best
            around = {s.layout: s for s in self._neighbours(start) if s.estimate.lacking <= 0}
            promising = sorted(
                (s for s in around.values() if s.layout not in self.found),
                key=lambda s: (s.estimate.iteration_ns, s.layout),
            )
            for seed in promising[:_NEIGHBOURS]:
                if seed.estimate.iteration_ns >= self.best.score.iteration_ns:
                    continue
                if not self._go_on():
                    return
                self._judge(seed.layout, seed.point, seed.estimate.iteration_ns)
                if self.best is not before:
                    break

    def _neighbours(self, found: Found) -> Iterator[Seed]:
        layout, point = found.layout, found.point
        if {"graph", "chain"} <= set(self.freedom.families) and not layout.sequential:
            yield from self._fitted(layout._replace(merged=not layout.merged), point)
        yield from self._fitted(layout._replace(far=not layout.far, place=()), point)
        together = packed(self.space, layout)
        if together is not None:
            yield from self._fitted(together, point)
        for slack in (layout.slack - 1, layout.slack + 1, layout.slack + 3):
            if slack >= 0:
                yield from self._fitted(layout._replace(slack=slack), point)
        value = estimate(self.space, layout)
        if value is not None:
            if max(self.freedom.replicas) > 1:
                for other in transfers(
                    self.space, Seed(value, layout, point), self.freedom.replicas
                ):
                    for seed in self._fitted(other, point):
                        yield polish(self.space, seed, _POLISH_STEPS // 4)
            for seed in moved(self.space, Seed(value, layout, point), _MOVED_PARTS):
                self.judged += 1
                yield seed
        if len(layout.assign) * len(layout.replicas) <= _SMALL:
            for other in every_move(self.space, layout):
                if set(other.replicas) <= set(self.freedom.replicas) and not self.freedom.parts:
                    yield from self._fitted(other, point)
        sizes = self.freedom.micro_batches or micro_batch_sizes(self.space.samples(layout.copies))
        for batch in _next_to(sizes, layout.micro_batch):
            part_batch = tuple(batch * q // layout.micro_batch for q in layout.part_batch)
            resized = layout._replace(micro_batch=batch, part_batch=part_batch)
            for seed in self._fitted(resized, point._replace(batch=batch)):
                yield seed
                yield polish(self.space, seed, _POLISH_STEPS // 4)
        for part in range(len(layout.replicas)):
            now = layout.part_batch or (layout.micro_batch,) * len(layout.replicas)
            for size in (now[part] // 2, now[part] * 2):
                if size and size in sizes:
                    changed = (*now[:part], size, *now[part + 1 :])
                    yield from self._fitted(layout._replace(part_batch=changed), point)

    def _fitted(self, layout: Layout, point: Plane) -> Iterator[Seed]:
        seed = fitted(self.space, layout, point, self.freedom.recompute)
        self.judged += 1
        if seed is not None:
            yield seed


_QUICK_TOLERANCE = 1.15
_POINTS = 14
_POLISHED = 10
_PER_POINT = 3
_POLISH_STEPS = 40
_REFINED = 3
_MOVED_PARTS = 3
_SMALL = 40
_NEIGHBOURS = 12
_CLOSE = 1.2
_CLOSE_POLISHED = 1.04
"""Chains may win after all if their best estimate, before and after polishing, is at most so
many times our best schedule: what refinement was seen to gain."""
_CLIMBED = 3
_CLIMB_ROUNDS = 12
_MOST_TASKS = 3000
_TASKS_PER_UNIT = 40
_GOOD_ENOUGH = 1.001
_HOPELESS = 1.25
"""A schedule is not improved further if it is so close to the estimate, or so far above the
best: backward-forward rounds were seen to gain up to a fifth."""
_TOO_MANY_TASKS = 12_000
"""Schedules with more tasks are considered only if there are no others: they take seconds to
simulate, and minutes of overhead to run."""


def _next_to(sizes: list[int] | tuple[int, ...], size: int) -> list[int]:
    smaller = [s for s in sizes if s < size]
    larger = [s for s in sizes if s > size]
    return [*([max(smaller)] if smaller else []), *([min(larger)] if larger else [])]
