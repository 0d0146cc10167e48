"""The baselines by name: each gives recipes, one for every micro-batch size that it tries.

PipeDream and Piper do not choose a micro-batch size, so each size is planned for and the
caller keeps the plan that simulates fastest within memory, as their users would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from graphpipe.errors import InfeasibleError
from graphpipe.planner.baselines import graphpipe_paper, pipedream, piper, plain
from graphpipe.planner.baselines.downsets import enumerate_down_sets
from graphpipe.planner.baselines.inputs import pipedream_costs, piper_input, unit_edges
from graphpipe.planner.baselines.recipe import (
    FREE,
    Deadline,
    Machines,
    Recipe,
    RecipeStage,
    in_topological_order,
    micro_batch_sizes,
)
from graphpipe.planner.unit_graph import UnitGraph

Baseline = Callable[[UnitGraph, Machines, int, Deadline], Iterator[Recipe]]


def pipedream_recipes(
    units: UnitGraph, machines: Machines, batch_size: int, deadline: Deadline
) -> Iterator[Recipe]:
    """PipeDream, run synchronously: gradients are reduced once per mini-batch, and that is what
    its objective charges. With its memory check and without, since the check is a rough one."""
    edges = unit_edges(units)
    sets = enumerate_down_sets(len(units), edges)
    levels = [pipedream.Level(machines.per_node, machines.inner)]
    if machines.nodes > 1:
        levels.append(pipedream.Level(machines.nodes, machines.outer))
    levels = [level for level in levels if level.machines > 1] or levels[:1]
    sizes = micro_batch_sizes(batch_size)
    for done, size in enumerate(sizes):
        if done:
            deadline.expect(done, len(sizes))
        costs = pipedream_costs(units, machines.kind, size)
        for memory in (None, machines.memory_bytes):
            try:
                found = pipedream.optimise(
                    costs,
                    edges,
                    levels,
                    memory_bytes=memory,
                    synchronise_every=-(-batch_size // size),
                    down_sets=sets,
                    check=deadline.check,
                )
            except InfeasibleError:
                continue
            stages = tuple(RecipeStage(s.nodes, s.replicas, size) for s in found.stages)
            yield Recipe(stages)
            if _passes_any_check(costs, stages, machines):
                break  # the memory check would not change anything


def _passes_any_check(
    costs: pipedream.NodeCosts, stages: tuple[RecipeStage, ...], machines: Machines
) -> bool:
    """Whether PipeDream's memory check holds even with all machines after every stage."""
    kept = costs.parameter_bytes + costs.activation_bytes
    return all(
        -(-machines.devices // stage.replicas) * kept[list(stage.units)].sum()
        <= machines.memory_bytes
        for stage in stages
    )


def piper_recipes(
    units: UnitGraph, machines: Machines, batch_size: int, deadline: Deadline
) -> Iterator[Recipe]:
    """Piper. A stage recomputes if any of its units was to: our stages do it as a whole."""
    sets = enumerate_down_sets(len(units), [(b, a) for a, b in unit_edges(units)])
    sizes = micro_batch_sizes(batch_size)
    for done, size in enumerate(sizes):
        if done:
            deadline.expect(done, len(sizes))
        problem = piper_input(
            units,
            machines.kind,
            size,
            micro_batches=-(-batch_size // size),
            memory_bytes=machines.memory_bytes,
            bandwidth=machines.outer,
        )
        try:
            found = piper.optimise(problem, machines.devices, sets=sets, check=deadline.check)
        except InfeasibleError:
            continue
        yield Recipe(
            tuple(
                RecipeStage(s.nodes, s.replicas, size, any(s.configuration)) for s in found.stages
            )
        )


def graphpipe_recipes(
    units: UnitGraph, machines: Machines, batch_size: int, deadline: Deadline
) -> Iterator[Recipe]:
    """GraphPipe as published, with each size as the largest that a stage may take."""
    sizes = micro_batch_sizes(batch_size)
    for done, size in enumerate(sizes):
        if done:
            deadline.expect(done, len(sizes))
        try:
            found = graphpipe_paper.optimise(
                units,
                machines.kind,
                machines.devices,
                batch_size=batch_size,
                largest_micro_batch=size,
                memory_bytes=machines.memory_bytes,
                bandwidth=None if machines.outer == FREE else machines.outer,
                check=deadline.check,
            )
        except InfeasibleError:
            continue
        stages = [RecipeStage(s.units, s.replicas, s.micro_batch) for s in found.stages]
        yield Recipe(in_topological_order(units, stages), chain=False)


def _plain(
    make: Callable[[UnitGraph, Machines, int], Iterator[Recipe]],
) -> Baseline:
    def recipes(
        units: UnitGraph, machines: Machines, batch_size: int, deadline: Deadline
    ) -> Iterator[Recipe]:
        for recipe in make(units, machines, batch_size):
            deadline.check()
            yield recipe

    return recipes


BASELINES: dict[str, Baseline] = {
    "pipedream": pipedream_recipes,
    "piper": piper_recipes,
    "graphpipe-paper": graphpipe_recipes,
    "data-parallel": _plain(plain.data_parallel),
    "gpipe": _plain(plain.gpipe),
    "1f1b": _plain(plain.one_f_one_b),
}
"""Recipes by the baseline's name."""
