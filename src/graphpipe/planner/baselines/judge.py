"""What a recipe takes: its problem, its schedule, and the simulated iteration.

A baseline that plans a chain is run as one: stage i waits for stage i - 1 even where no
tensor passes between them, and keeps as many samples in flight as its place in the chain
asks for. That is what sequential pipelines do.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from graphpipe.cost.cluster import Cluster
from graphpipe.errors import ScheduleError
from graphpipe.plan.builders import Built, build_schedule
from graphpipe.plan.in_flight import in_flight_bounds
from graphpipe.plan.plan import Plan
from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec, problem_of
from graphpipe.plan.task_graph import TaskGraph
from graphpipe.planner.baselines.recipe import Recipe, RecipeStage
from graphpipe.planner.unit_graph import IMPOSSIBLE_NS, UnitGraph
from graphpipe.simulate.light import simulate_problem


class Judged(NamedTuple):
    """A recipe with its schedule and its simulated iteration time."""

    recipe: Recipe
    built: Built
    iteration_ns: int


def judge(units: UnitGraph, cluster: Cluster, recipe: Recipe, batch_size: int) -> Judged | None:
    """Schedules and simulates a recipe, with contention, all-reduce and optimizer.

    Returns:
        None where a unit cannot run at the recipe's micro-batch size.
    """
    problem = recipe_problem(units, cluster, recipe, batch_size)
    if problem is None:
        return None
    try:
        built = build_schedule(problem, recipe.builder)
    except ScheduleError:  # sizes that do not divide can need more in flight than the rule says
        built = build_schedule(problem, "list", raise_bounds=True)
    groups, optimizer_ns = [], [0] * cluster.world_size
    for stage, spec in zip(recipe.stages, problem.stages, strict=True):
        facts = units.facts(stage.units)
        gradient, tensors = facts.gradient, facts.gradient_tensors
        if gradient and len(spec.devices) > 1:
            groups.append((spec.devices, int(gradient)))
        for rank in spec.devices:
            costs = units.costs.device_costs(cluster.devices[rank].kind)
            optimizer_ns[rank] = round(costs.optimizer_seconds(gradient, tensors) * 1e9)
    simulated = simulate_problem(
        problem,
        built.lines,
        cluster,
        network="shared",
        graph=built.graph,
        groups=groups,
        optimizer_ns=optimizer_ns,
    )
    return Judged(recipe, built, simulated.iteration_ns)


def recipe_problem(
    units: UnitGraph, cluster: Cluster, recipe: Recipe, batch_size: int
) -> PipelineProblem | None:
    """The recipe as a scheduling problem, chain edges included; None: a unit cannot run."""
    stages = recipe.stages
    edges = _edges(units, stages)
    specs: list[StageSpec] = []
    first = 0
    for stage in stages:
        devices = tuple(range(first, first + stage.replicas))
        first += stage.replicas
        forward_ns = backward_ns = 0
        for kind in {cluster.devices[rank].kind for rank in devices}:
            forward, backward = units.times(kind, stage.micro_batch)
            forward_ns = max(forward_ns, sum(forward[u] for u in stage.units))
            backward_ns = max(backward_ns, sum(backward[u] for u in stage.units))
        if max(forward_ns, backward_ns) >= IMPOSSIBLE_NS:
            return None
        has_backward = units.facts(stage.units).has_backward
        if not has_backward:
            backward_ns = 0
        elif stage.recompute:
            backward_ns += forward_ns
        size, replicas = stage.micro_batch, stage.replicas
        specs.append(
            StageSpec(size, replicas, 1, size, devices, forward_ns, backward_ns, has_backward)
        )
    if recipe.chain:
        edges = chain_edges(edges, [spec.has_backward for spec in specs])
    bounds = in_flight_bounds(
        [spec.micro_batch for spec in specs],
        [spec.replicas for spec in specs],
        [(edge.source, edge.target) for edge in edges],
        batch_size,
        has_backward=[spec.has_backward for spec in specs],
        without_gradient={(e.source, e.target) for e in edges if not e.has_gradient},
    )
    held = bounds.in_flight if recipe.builder != "gpipe" else [batch_size] * len(specs)
    return PipelineProblem(
        tuple(
            spec._replace(block=block, in_flight=in_flight)
            for spec, block, in_flight in zip(specs, bounds.block, held, strict=True)
        ),
        edges,
        batch_size,
        cluster.world_size,
    )


def _edges(units: UnitGraph, stages: tuple[RecipeStage, ...]) -> tuple[EdgeSpec, ...]:
    """What passes between the stages: each tensor once to each stage that reads it."""
    owner = {u: s for s, stage in enumerate(stages) for u in stage.units}
    backward = [units.facts(stage.units).has_backward for stage in stages]
    found: dict[tuple[int, int], EdgeSpec] = {}
    for tensor in units.tensors:
        source = owner[tensor.producer]
        for target in {owner[u] for u in tensor.consumers} - {source}:
            old = found.get(
                (source, target),
                EdgeSpec(source, target, has_gradient=False, batched=False, gradient_batched=False),
            )
            gradient = tensor.has_gradient and backward[source] and backward[target]
            found[source, target] = EdgeSpec(
                source,
                target,
                old.forward_bytes + tensor.forward_bytes,
                old.forward_fixed + tensor.forward_fixed,
                old.backward_bytes + (tensor.backward_bytes if gradient else 0.0),
                old.backward_fixed + (tensor.backward_fixed if gradient else 0.0),
                old.has_gradient or gradient,
                old.batched or tensor.batched,
                old.gradient_batched or (tensor.batched and gradient),
            )
    return tuple(found[key] for key in sorted(found))


def chain_edges(edges: tuple[EdgeSpec, ...], has_backward: list[bool]) -> tuple[EdgeSpec, ...]:
    """``edges`` and empty ones, so that every stage follows the one before it."""
    present = {(edge.source, edge.target): edge for edge in edges}
    added = []
    for pair in pairwise(range(len(has_backward))):
        if pair not in present:
            source, target = pair
            gradient = has_backward[source] and has_backward[target]
            added.append(EdgeSpec(source, target, has_gradient=gradient))
    return (*edges, *added)


def chain_ns(plan: Plan) -> int:
    """Iteration time of a plan whose stages run as a chain in their order, nanoseconds.

    A plan file holds the true dependencies only, along which it runs a little faster. Plans of
    one copy.
    """
    assert plan.copies == 1
    problem, _ = problem_of(plan)
    edges = chain_edges(problem.edges, [stage.has_backward for stage in problem.stages])
    chained = PipelineProblem(problem.stages, edges, problem.samples, problem.world_size)
    graph = TaskGraph(chained, bounded=False)
    simulated = simulate_problem(
        chained,
        graph.numbers(plan.schedule.tasks),
        plan.cluster,
        network="shared",
        graph=graph,
        groups=[(group.ranks, group.nbytes) for group in plan.reduce_groups],
        optimizer_ns=plan.optimizer_ns,
    )
    return simulated.iteration_ns
