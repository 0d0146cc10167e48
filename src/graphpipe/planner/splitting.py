"""Plans for the graph as it is and with its joins split, and keeps the better one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphpipe.cost.analytic import estimate
from graphpipe.cost.table import CostTable
from graphpipe.errors import CostError, GraphPipeError, InfeasibleError
from graphpipe.graph.model_graph import JoinSplit, ModelGraph
from graphpipe.graph.split_joins import split_joins
from graphpipe.plan.plan import Plan
from graphpipe.units import format_ns

Make = Callable[[ModelGraph, CostTable], Plan]

MOST_TRIED = 4
"""Of a graph with up to so many joins, each is also left whole to see whether that is better."""


def better_of_both(
    graph: ModelGraph, costs: CostTable, split_costs: CostTable | None, make: Make
) -> Plan:
    """The best plan for the graph with all, some or none of its joins split.

    Args:
        graph: The graph as it is, with its program.
        costs: Its costs.
        split_costs: Costs of ``split_joins(graph)``; None: estimated as ``costs`` were.
        make: Searches a plan for a graph and its costs.

    Raises:
        CostError: if the costs are not of these graphs, or ``costs`` were measured and
            ``split_costs`` are not given.
        InfeasibleError: if no plan fits for any of them.
    """
    if graph.joins:
        raise CostError(
            "The joins of this graph are split already",
            where=f"graph {graph.name!r}",
            fix="Give the graph as it was captured, or plan without split_joins",
        )
    whole, refusal = _attempt(make, graph, costs)
    try:
        split = split_joins(graph)
    except GraphPipeError as error:
        if whole is None:
            assert refusal is not None
            raise refusal from None
        return _noted(whole, f"No join was split: {error}")
    table = _costs_of(split, costs, split_costs)
    best, refused = _attempt(make, split, table)
    if best is not None and split_costs is None and 1 < len(split.joins) <= MOST_TRIED:
        best = _leave_out(graph, costs, split.joins, best, make)
    if best is None and whole is None:
        assert refused is not None
        raise refused
    if best is None or (whole is not None and _seconds(whole) <= _seconds(best)):
        assert whole is not None
        found = (
            "no plan with split joins fits"
            if best is None
            else (f"the best plan with split joins takes {_time(best)}, this one {_time(whole)}")
        )
        return _noted(whole, f"No join was split: {found}.")
    names = ", ".join(item.parameter for item in best.split_joins)
    found = "no plan fits" if whole is None else f"{_time(whole)}"
    return _noted(
        best, f"Joins split: {names}. It takes {_time(best)}; without splitting: {found}."
    )


def _leave_out(
    graph: ModelGraph, costs: CostTable, joins: Sequence[JoinSplit], best: Plan, make: Make
) -> Plan:
    """The best plan after leaving joins whole, one after the other, where that is faster."""
    kept = list(joins)
    for join in joins:
        if len(kept) == 1:
            break
        fewer = split_joins(graph, [item for item in kept if item is not join])
        other, _ = _attempt(make, fewer, _costs_of(fewer, costs, None))
        if other is not None and _seconds(other) < _seconds(best):
            best = other
            kept.remove(join)
    return best


def _attempt(
    make: Make, graph: ModelGraph, costs: CostTable
) -> tuple[Plan | None, InfeasibleError | None]:
    try:
        return make(graph, costs), None
    except InfeasibleError as error:
        return None, error


def _costs_of(split: ModelGraph, costs: CostTable, given: CostTable | None) -> CostTable:
    """Costs of the graph with split joins."""
    if given is not None:
        given.check(split)
        return given
    fix = (
        "Give the costs of the rewritten graph: split_joins=graphpipe.profile("
        "graphpipe.split_joins(graph)), or graphpipe.estimate(...) of it"
    )
    if costs.source != "analytic" or not costs.optimizer or not costs.precision:
        raise CostError(
            "These costs do not say what the parts of a split linear take",
            where=f"graph {split.name!r}",
            expected="estimated costs, which can be estimated again",
            got=f"{costs.source} costs",
            fix=fix,
        )
    return estimate(
        split,
        list(costs.devices),
        micro_batches=costs.micro_batches,
        optimizer=costs.optimizer,
        precision=costs.precision,
        parameter_memory=costs.parameter_memory,
    )


def _seconds(plan: Plan) -> int:
    assert plan.prediction is not None
    return plan.prediction.iteration_ns


def _time(plan: Plan) -> str:
    return format_ns(_seconds(plan))


def _noted(plan: Plan, note: str) -> Plan:
    return plan.model_copy(update={"notes": (*plan.notes, note)})
