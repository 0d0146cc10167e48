"""All plans of a small input, without assembling any: the best one bounds the lower bound.

It is on purpose generous: free messages, no memory limit, several micro-batch sizes,
stages that share devices, replicas with what their all-reduce costs, slack, both builders.
Whatever a planner may find, something at least as fast is here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from graphpipe.cost.cluster import Cluster
from graphpipe.cost.published.build import KIND, GraphFile
from graphpipe.plan.builders import kfkb, list_schedule
from graphpipe.plan.builders.built import Built, one_stage_per_rank
from graphpipe.plan.in_flight import with_bounds
from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec
from graphpipe.planner.unit_graph import UnitGraph
from tests.planner.synthetic import units_of

Partition = tuple[tuple[int, ...], ...]


def partitions(units: UnitGraph) -> Iterator[Partition]:
    """Every way to divide the units into stages whose graph has no cycle."""
    count = len(units)

    def extend(unit: int, blocks: list[list[int]]) -> Iterator[Partition]:
        if unit == count:
            found = tuple(tuple(block) for block in blocks)
            if _edges(units, found) is not None:
                yield found
            return
        for block in blocks:
            block.append(unit)
            yield from extend(unit + 1, blocks)
            block.pop()
        yield from extend(unit + 1, [*blocks, [unit]])

    return extend(0, [])


def _edges(units: UnitGraph, stages: Partition) -> list[tuple[int, int]] | None:
    """Edges between stages, or None if they form a cycle."""
    owner = {u: s for s, stage in enumerate(stages) for u in stage}
    edges = {
        (owner[v], owner[u])
        for u, above in enumerate(units.predecessors)
        for v in above
        if owner[v] != owner[u]
    }
    done: set[int] = set()
    while len(done) < len(stages):
        ready = {s for s in range(len(stages)) if s not in done} - {
            b for a, b in edges if a not in done
        }
        if not ready:
            return None
        done |= ready
    return sorted(edges)


def placements(stages: int, devices: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Devices of each stage: one of them, or two replicas; devices may host several stages."""
    single = [(rank,) for rank in range(devices)]
    double = [(a, b) for a in range(devices) for b in range(a + 1, devices)]
    return product(single + double, repeat=stages)


def fastest_ns(file: GraphFile, cluster: Cluster, batch_size: int) -> int:
    """Iteration time of the best plan, nanoseconds."""
    units = units_of(file)
    best = 10**18
    sizes = [b for b in (1, 2, 3, 4, 8) if b <= batch_size]
    for stages in partitions(units):
        edges = _edges(units, stages)
        assert edges is not None
        for ranks in placements(len(stages), cluster.world_size):
            for size in sizes:
                problem = _problem(units, stages, edges, ranks, size, batch_size, cluster)
                for built in _schedules(problem):
                    best = min(best, _iteration_ns(built, units, stages, cluster))
    return best


def _problem(
    units: UnitGraph,
    stages: Partition,
    edges: list[tuple[int, int]],
    ranks: tuple[tuple[int, ...], ...],
    size: int,
    batch_size: int,
    cluster: Cluster,
) -> PipelineProblem:
    forward, backward = units.times(KIND, size)
    specs = []
    for stage, devices in zip(stages, ranks, strict=True):
        specs.append(
            StageSpec(
                size,
                len(devices),
                1,
                size,
                devices,
                sum(forward[u] for u in stage),
                sum(backward[u] for u in stage),
                any(units.has_backward[u] for u in stage),
            )
        )
    owner = {u: s for s, stage in enumerate(stages) for u in stage}
    trained = {
        (owner[t.producer], owner[u]) for t in units.tensors if t.has_gradient for u in t.consumers
    }
    links = tuple(EdgeSpec(a, b, has_gradient=(a, b) in trained) for a, b in edges)
    return PipelineProblem(tuple(specs), links, batch_size, cluster.world_size)


def _schedules(problem: PipelineProblem) -> Iterator[Built]:
    for slack in (0, 2):
        bounded = with_bounds(problem, slack)
        yield list_schedule(bounded, raise_bounds=True)
        if one_stage_per_rank(problem):
            yield kfkb(bounded)


def _iteration_ns(built: Built, units: UnitGraph, stages: Partition, cluster: Cluster) -> int:
    """The last task of a rank, then its all-reduces and its optimizer step."""
    last = [max((built.end[n] for n in line), default=0) for line in built.lines]
    costs = units.costs.device_costs(KIND)
    ends = list(last)
    for stage, spec in zip(stages, built.problem.stages, strict=True):
        facts = units.facts(stage)
        gradient = facts.gradient
        ready = max(last[rank] for rank in spec.devices)
        reduce = cluster.all_reduce_seconds(spec.devices, gradient) if gradient else 0.0
        for rank in spec.devices:
            step = costs.optimizer_seconds(gradient, facts.gradient_tensors)
            ends[rank] = max(ends[rank], ready) + round((reduce + step) * 1e9)
    return max(ends)
