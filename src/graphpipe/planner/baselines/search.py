"""From a baseline's recipes to its plan."""

from __future__ import annotations

import time
from typing import NamedTuple

from graphpipe.cost.cluster import Cluster
from graphpipe.errors import InfeasibleError
from graphpipe.plan.assemble import StageChoice, assemble
from graphpipe.plan.plan import Plan
from graphpipe.planner.baselines.inputs import fuse_chains, unit_seconds
from graphpipe.planner.baselines.judge import Judged, chain_ns, judge
from graphpipe.planner.baselines.recipe import Deadline, Machines, machines_of
from graphpipe.planner.baselines.registry import BASELINES
from graphpipe.planner.unit_graph import UnitGraph
from graphpipe.simulate.predict import prediction_of
from graphpipe.simulate.simulator import simulate


class BaselinePlan(NamedTuple):
    """A baseline's plan and how it was found.

    Attributes:
        plan: With its prediction, which is for a run along the true dependencies.
        iteration_ns: As the baseline runs it: a chain as a chain.
        search_seconds: CPU time of its optimiser, over all micro-batch sizes (scheduling and
            simulation are ours and do not count).
        longest_seconds: CPU time of its optimiser for the size that took longest.
        units: Nodes of the graph that it was given.
    """

    plan: Plan
    iteration_ns: int
    search_seconds: float
    longest_seconds: float
    units: int


def plan_baseline(
    name: str,
    units: UnitGraph,
    cluster: Cluster,
    batch_size: int,
    *,
    time_limit: float | None = None,
) -> BaselinePlan:
    """The plan of a baseline: of all micro-batch sizes the fastest one that fits the memory.

    Args:
        name: One of :data:`~graphpipe.planner.baselines.registry.BASELINES`.
        units: What it divides.
        cluster: The devices.
        batch_size: B, samples.
        time_limit: CPU seconds for its optimiser, over all sizes.

    Raises:
        SearchTimeoutError: if its optimiser took longer.
        DownSetLimitError: if the graph has too many down-sets for it.
        InfeasibleError: if none of its plans fits into the memory.
    """
    machines = machines_of(units, cluster)
    search = longest = 0.0
    judged: list[Judged] = []
    recipes = BASELINES[name](units, machines, batch_size, Deadline(time_limit))
    while True:
        start = time.process_time()
        recipe = next(recipes, None)
        taken = time.process_time() - start
        search, longest = search + taken, max(longest, taken)
        if recipe is None:
            break
        found = None
        if all(item.recipe != recipe for item in judged):
            found = judge(units, cluster, recipe, batch_size)
        if found is not None and _least_memory(units, found) <= machines.memory_bytes:
            judged.append(found)
    for item in sorted(judged, key=lambda j: (j.iteration_ns, j.recipe.stages)):
        plan = _fitting_plan(name, units, cluster, batch_size, item)
        if plan is not None:
            assert plan.prediction is not None
            taken_ns = plan.prediction.iteration_ns
            if item.recipe.chain:
                taken_ns = chain_ns(plan)
            return BaselinePlan(plan, taken_ns, search, longest, len(units))
    raise InfeasibleError(
        f"The planner {name!r} has no plan that fits into the memory",
        expected=f"at most {machines.memory_bytes:.4g} bytes on each device",
        fix="Give more devices or memory, or use the default planner, which has more freedom",
    )


def _least_memory(units: UnitGraph, judged: Judged) -> float:
    """Bytes that the fullest device needs at least, before its buffers are counted."""
    most = 0.0
    for stage, spec in zip(judged.recipe.stages, judged.built.problem.stages, strict=True):
        facts = units.facts(stage.units)
        held = -(-min(spec.in_flight, judged.built.problem.samples) // spec.replicas)
        saved = facts.saved_bytes * held
        if stage.recompute:
            saved = min(saved, facts.input_bytes * held + facts.saved_bytes * spec.micro_batch)
        most = max(most, facts.static + saved)
    return most


def _fitting_plan(
    name: str, units: UnitGraph, cluster: Cluster, batch_size: int, judged: Judged
) -> Plan | None:
    """The plan with its prediction, or None if its simulated peak exceeds a device."""
    problem = judged.built.problem
    names = [op.name for op in units.graph.ops]
    choices = [
        StageChoice(
            ops=tuple(names[op] for op in sorted(o for u in stage.units for o in units.members[u])),
            micro_batch=spec.micro_batch,
            replicas=spec.replicas,
            devices=spec.devices,
            block=spec.block,
            in_flight=spec.in_flight,
            recompute=stage.recompute,
        )
        for stage, spec in zip(judged.recipe.stages, problem.stages, strict=True)
    ]
    plan = assemble(
        units.graph,
        units.costs,
        cluster,
        choices,
        batch_size=batch_size,
        lines=judged.built.graph.tasks(judged.built.lines),
        builder=judged.built.builder,
        planner=name,
    )
    timeline = simulate(plan)
    plan = plan.model_copy(update={"prediction": prediction_of(plan, timeline)})
    capacity = [device.memory_bytes for device in cluster.devices]
    if any(peak > room for peak, room in zip(timeline.peak_memory, capacity, strict=True)):
        return None
    return plan


def fused_for_baselines(
    units: UnitGraph, cluster: Cluster, micro_batch: int, limit: int
) -> UnitGraph:
    """The units with chains fused until they have at most ``limit`` down-sets.

    Raises:
        DownSetLimitError: if fusing does not get there.
    """
    machines: Machines = machines_of(units, cluster)
    forward, backward = unit_seconds(units, machines.kind, micro_batch)
    return fuse_chains(units, [float(x) for x in forward + backward], limit=limit)
