"""From a search to a plan that fits: at its simulated peak, not only by the estimate.

Candidates are judged by an estimate of their memory, which leaves out messages under way.
Where the best plan exceeds a device after all, the next best that were found are looked at,
and only if none of them fits the search is made again with a margin, the least by which one
of them failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from graphpipe.plan.plan import Plan
from graphpipe.planner.explore import Found, Progress, Search
from graphpipe.planner.lower_bound import lower_bound
from graphpipe.planner.patience import Patience
from graphpipe.planner.realise import by_contention, realised
from graphpipe.planner.seeds import Freedom, Seed
from graphpipe.planner.space import Space

MEMORY_ROUNDS = 6
"""Searches, each with a larger margin, until a plan fits at its peak as well."""

_FINALISTS = 3
_LOOKED_AT = 8
"""Finalists are simulated with contention before one is chosen; so many candidates are
looked at before the search is repeated because none fits."""


class Outcome(NamedTuple):
    """``plan``, or why there is none: the plan that exceeds memory least, at its simulated
    peak, and the layout that lacks least by the estimate."""

    plan: Plan | None
    over: Plan | None = None
    lacking: Seed | None = None


def fitting_plan(
    space: Space,
    freedom: Freedom,
    *,
    budget: int,
    patience: Patience,
    progress: Progress | None = None,
) -> Outcome:
    """Searches until a plan fits.

    Args:
        space: The search space; its margin is raised where that is needed.
        freedom: What may vary.
        budget: The most candidates to judge in one search.
        patience: When to end early.
        progress: See :func:`graphpipe.planner.search.plan`.
    """
    over: Plan | None = None
    lacking: Seed | None = None
    least = float("inf")
    for _ in range(MEMORY_ROUNDS):
        search = Search(space, freedom, budget=budget, stop=patience.stop, progress=progress)
        with patience.guarded(lambda search=search: search.best is not None):  # type: ignore[misc]
            search.run()
        if search.best is None:
            lacking = search.best_lacking
            break
        exceeded = float("inf")
        for found in _plans(space, search, patience):
            excess = over_memory(space, found)
            if excess <= 0:
                return Outcome(found)
            exceeded = min(exceeded, excess)
            if excess < least:
                least, over = excess, found
        space.margin += exceeded
    return Outcome(None, over, lacking)


def over_memory(space: Space, found: Plan) -> float:
    """Bytes by which a plan exceeds what it may use of a device, at its simulated peak."""
    assert found.prediction is not None
    peaks = found.prediction.peak_memory
    return max(peak - room for peak, room in zip(peaks, space.memory, strict=True))


def _plans(space: Space, search: Search, patience: Patience) -> Iterator[Plan]:
    """The best candidates as plans: of the finalists first the fastest under contention."""
    graph, costs = space.units.graph, space.units.costs
    bound = lower_bound(graph, costs, space.cluster, space.batch_size).nanoseconds
    notes = patience.note(search.stopped, search.judged)
    ranked = _different(search)
    chosen = by_contention(space, [search.exact(found) for found in _finalists(ranked)])
    yield realised(space, chosen, notes=notes, lower_bound_ns=bound)
    for found in ranked[:_LOOKED_AT]:
        if found.layout != chosen.layout:
            yield realised(space, search.exact(found), notes=notes, lower_bound_ns=bound)


def _different(search: Search) -> list[Found]:
    """The schedules found, one for each set of stages and sizes, the best first."""
    out: list[Found] = []
    seen: set[tuple[object, ...]] = set()
    for found in sorted(search.found.values(), key=lambda f: f.key):
        layout = found.layout
        key = (layout.assign, layout.micro_batch, layout.part_batch, layout.merged, layout.copies)
        if key not in seen:
            seen.add(key)
            out.append(found)
    return out


def _finalists(ranked: list[Found]) -> list[Found]:
    """The first few; only one if its tasks are so many that it was not scheduled in full."""
    out: list[Found] = []
    for found in ranked[:_FINALISTS]:
        out.append(found)
        if not found.score.exact:
            break
    return out
