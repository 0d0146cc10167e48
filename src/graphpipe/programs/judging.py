"""Judges plans: what bounds one, and what other planners would have found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from graphpipe.cost.analytic import estimate
from graphpipe.cost.table import CostTable
from graphpipe.errors import InputError
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.planner.compare import (
    OURS,
    PLANNERS,
    Comparison,
    ComparisonRow,
    Hopeless,
    check_names,
    compare,
)
from graphpipe.planner.explain import explain
from graphpipe.programs.planning import Hardware, Source


def explain_plan(found: Plan, graph: Path | None, costs: Path | None) -> str:
    """What bounds a plan, in words; with its graph, what the gap to the lower bound is made of.

    Raises:
        GraphPipeError: If a file is malformed or does not belong to the plan.
    """
    if graph is None:
        return explain(found)
    known = ModelGraph.load(graph)
    table = CostTable.load(costs) if costs is not None else estimate(known, found.cluster)
    table.check(known)
    if found.fingerprint != known.fingerprint:
        raise InputError(
            "The graph is not the one that was planned",
            where=str(graph),
            expected=f"fingerprint {found.fingerprint}",
            got=known.fingerprint,
        )
    return explain(found, known, table)


def compare_planners(
    model: str | None,
    graph: Path | None,
    hardware: Sequence[Hardware],
    *,
    batch_size: int | None,
    per_device: int | None,
    planners: Sequence[str] | None,
    optimizer: str,
    precision: str,
    time_limit: float,
    progress: Callable[[int, int, str], None],
    keep: Callable[[ComparisonRow], None] = lambda row: None,
) -> Comparison:
    """Runs planners on one model for several numbers of devices.

    Args:
        model: As for :class:`~graphpipe.programs.planning.Source`; None where ``graph`` is given.
        graph: As for :class:`~graphpipe.programs.planning.Source`.
        hardware: One for each number of devices.
        batch_size: B, samples, for all.
        per_device: Samples for each device, instead of ``batch_size``.
        planners: Their names; None: all.
        optimizer: For the estimate.
        precision: For the estimate.
        time_limit: CPU seconds of each planner but ours.
        progress: Called with (planners done, of how many, which one is running).
        keep: Called with each row as soon as it is there, so that an interruption loses nothing.

    Raises:
        GraphPipeError: Whatever is wrong with the input.
    """
    names = tuple(planners) if planners is not None else PLANNERS
    check_names(names)
    count_of = len(set(names) | {OURS}) * len(hardware)
    if batch_size is not None and per_device is not None:
        raise InputError("Both --batch-size and --per-device were given", fix="Give one of them")
    rows: list[ComparisonRow] = []
    hopeless = Hopeless()
    done = 0
    source = Source(model, graph)
    for item in hardware:
        count = item.devices or 0
        wanted = per_device * count if per_device is not None else batch_size
        problem = source.problem(item, batch_size=wanted, optimizer=optimizer, precision=precision)

        def tick(name: str, count: int = count) -> None:
            nonlocal done
            progress(done, count_of, f"{name}, {count} devices")
            done += 1

        compared = compare(
            problem.graph,
            problem.costs,
            problem.cluster,
            problem.batch_size,
            planners=names,
            time_limit=time_limit,
            hopeless=hopeless,
            progress=tick,
            keep=lambda found: keep(found.row),
        )
        rows += [row.row for row in compared]
    return Comparison(rows=tuple(rows))
