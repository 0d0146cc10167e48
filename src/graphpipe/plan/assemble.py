"""``assemble``: from a partition to a plan. Planners, baselines and manual plans use it.

Everything that follows from the partition is derived here, once: edges, names, times,
memory, samples in flight, schedule, reduce groups, optimizer times and input signatures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from graphpipe.cost.cluster import Cluster
from graphpipe.cost.table import CostTable
from graphpipe.errors import PlanError
from graphpipe.graph.cut import StageCut
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.builders import build_schedule
from graphpipe.plan.edges import cuts_of, edges_of_cuts, gradient_ops, input_signatures
from graphpipe.plan.in_flight import in_flight_bounds
from graphpipe.plan.modules import modules_of
from graphpipe.plan.names import stage_names
from graphpipe.plan.plan import Plan
from graphpipe.plan.problem import PipelineProblem, StageSpec, edge_spec
from graphpipe.plan.ranges import copy_range
from graphpipe.plan.schedule import Priority, Schedule, Task
from graphpipe.plan.stage import Stage, StageEdge, StageMemory, TaskTimes
from graphpipe.plan.stage_costs import (
    optimizer_times,
    parameter_bytes,
    parameters_by_rank,
    reduce_groups,
    stage_memory,
    task_times,
)
from graphpipe.plan.validate import coupled_notes


class StageChoice(NamedTuple):
    """What somebody must decide about a stage; the rest follows.

    Attributes:
        ops: Names of its ops, in any order; prep ops may be among them.
        micro_batch: b_s, samples.
        replicas: r_s.
        devices: Ranks, copy by copy and within a copy replica by replica.
        block: k_s, by default from the formula.
        in_flight: W_s in samples, by default from the formula.
        slack: Quanta added to W_s where the formula gives it.
        recompute: Run the forward again in the backward instead of keeping activations.
        name: For people, by default from the modules it holds.
    """

    ops: tuple[str, ...]
    micro_batch: int
    replicas: int
    devices: tuple[int, ...]
    block: int | None = None
    in_flight: int | None = None
    slack: int = 0
    recompute: bool = False
    name: str = ""


def assemble(
    graph: ModelGraph,
    costs: CostTable | None,
    cluster: Cluster,
    choices: Sequence[StageChoice],
    *,
    batch_size: int,
    copies: int = 1,
    builder: str = "auto",
    lines: Sequence[Sequence[Task]] | None = None,
    priority: Priority | Literal["best"] = "best",
    lead: Sequence[int] = (),
    planner: str = "manual",
    notes: Sequence[str] = (),
) -> Plan:
    """A plan of these stages; the same input gives the same plan.

    The plan is complete but neither validated (:func:`graphpipe.plan.validate.validate`) nor
    simulated (:func:`graphpipe.simulate.predict.with_prediction`).

    Args:
        graph: The graph; it needs no program.
        costs: Its costs; None for a plan without predicted times and memory.
        cluster: Devices and network.
        choices: The stages, in any order. Stage numbers follow it.
        batch_size: B, samples of a mini-batch over all copies.
        copies: R.
        builder: ``auto``, ``kfkb``, ``list`` or ``gpipe``; with ``lines`` only a name.
        lines: Task lists of copy 0 by rank, instead of a builder's; other copies get the same
            lists on their own ranks.
        priority: Of ``list`` scheduling; ``best`` takes the one with the shortest schedule.
        lead: Of ``list`` scheduling.
        planner: Name of the planner.
        notes: Remarks for the user.

    Raises:
        PlanError: if an op is missing or doubled, the stages form a cycle, or devices do not
            match replicas and copies.
        ScheduleError: if there is no schedule for the in-flight samples asked for.
        InfeasibleError: if an op cannot run with its stage's micro-batch.
        CostError: if the costs belong to another graph.
    """
    if costs is not None:
        costs.check(graph)
    _check_devices(choices, copies, cluster.world_size)
    cuts = cuts_of(graph, choices)
    edges = edges_of_cuts(graph, cuts, costs)
    with_gradient = gradient_ops(graph)
    backward = [any(name in with_gradient for name in cut.ops) for cut in cuts]
    names = stage_names(graph, [cut.ops for cut in cuts], [choice.name for choice in choices])
    samples = max(len(copy_range(c, copies, batch_size)) for c in range(copies))
    bounds = _bounds(choices, edges, backward, samples, names)
    stages = [
        Stage(
            name=names[s],
            ops=cuts[s].ops,
            modules=modules_of(graph, cuts[s].ops),
            micro_batch=choice.micro_batch,
            replicas=choice.replicas,
            devices=choice.devices,
            block=bounds[s][0],
            in_flight=bounds[s][1],
            has_backward=backward[s],
            recompute=choice.recompute and backward[s],
            times=_times(graph, costs, cluster, cuts[s], choice, backward[s]),
            memory=_memory(graph, costs, cuts[s], choice, backward[s]),
        )
        for s, choice in enumerate(choices)
    ]
    if lines is None:
        schedule, in_flight = _schedule(
            stages, edges, cluster, batch_size, copies, builder, priority, tuple(lead)
        )
        stages = [
            stage if stage.in_flight == bound else Stage(**{**dict(stage), "in_flight": bound})
            for stage, bound in zip(stages, in_flight, strict=True)
        ]
    else:
        schedule = _given(lines, stages, cluster.world_size, copies, builder)
    held = parameters_by_rank(cuts, [stage.devices for stage in stages], cluster.world_size)
    trained = frozenset(
        name for cut, back in zip(cuts, backward, strict=True) if back for name in cut.parameters
    )
    return Plan(
        model=graph.name,
        fingerprint=graph.fingerprint,
        split_joins=graph.joins,
        batch_size=batch_size,
        copies=copies,
        cluster=cluster,
        stages=tuple(stages),
        edges=edges,
        inputs=input_signatures(graph, cuts),
        reduce_groups=reduce_groups(graph, held, trained),
        optimizer_ns=(
            optimizer_times(graph, costs, cluster, held, trained) if costs is not None else ()
        ),
        static_memory=(
            tuple(
                round(sum(parameter_bytes(graph, costs.parameter_memory, sorted(names))))
                for names in held
            )
            if costs is not None
            else ()
        ),
        schedule=schedule,
        planner=planner,
        notes=(*notes, *coupled_notes(graph, stages, batch_size)),
    )


def _check_devices(choices: Sequence[StageChoice], copies: int, world_size: int) -> None:
    if not choices:
        raise PlanError("A plan needs a stage", fix="Give at least one StageChoice")
    for number, choice in enumerate(choices):
        where = f"stage {number}" + (f" ({choice.name})" if choice.name else "")
        if len(choice.devices) != choice.replicas * copies:
            raise PlanError(
                "A stage needs a device for each replica of each copy",
                where=where,
                expected=f"{choice.replicas} x {copies} devices",
                got=f"{len(choice.devices)}: {list(choice.devices)}",
            )
        unknown = [rank for rank in choice.devices if not 0 <= rank < world_size]
        if unknown:
            raise PlanError(
                "A stage names devices that the cluster does not have",
                where=where,
                expected=f"ranks 0 to {world_size - 1}",
                got=unknown,
            )


def _bounds(
    choices: Sequence[StageChoice],
    edges: Sequence[StageEdge],
    backward: Sequence[bool],
    samples: int,
    names: Sequence[str],
) -> list[tuple[int, int]]:
    """k_s and W_s of each stage: the formula's unless chosen."""
    found = in_flight_bounds(
        [choice.micro_batch for choice in choices],
        [choice.replicas for choice in choices],
        [(edge.source, edge.target) for edge in edges],
        samples,
        has_backward=backward,
        without_gradient={(e.source, e.target) for e in edges if not e.has_gradient},
        slack=[choice.slack for choice in choices],
        names=names,
    )
    return [
        (
            choice.block if choice.block is not None else block,
            choice.in_flight if choice.in_flight is not None else in_flight,
        )
        for choice, block, in_flight in zip(choices, *found, strict=True)
    ]


def _times(
    graph: ModelGraph,
    costs: CostTable | None,
    cluster: Cluster,
    cut: StageCut,
    choice: StageChoice,
    has_backward: bool,
) -> dict[str, TaskTimes]:
    if costs is None:
        return {}
    kinds = sorted({cluster.devices[rank].kind for rank in choice.devices})
    return {
        kind: task_times(
            graph,
            costs,
            cut,
            kind,
            choice.micro_batch,
            has_backward=has_backward,
            recompute=choice.recompute,
        )
        for kind in kinds
    }


def _memory(
    graph: ModelGraph,
    costs: CostTable | None,
    cut: StageCut,
    choice: StageChoice,
    has_backward: bool,
) -> StageMemory:
    if costs is None:
        return StageMemory()
    return stage_memory(
        graph,
        costs,
        cut,
        choice.micro_batch,
        has_backward=has_backward,
        recompute=choice.recompute,
    )


def _schedule(
    stages: Sequence[Stage],
    edges: Sequence[StageEdge],
    cluster: Cluster,
    batch_size: int,
    copies: int,
    builder: str,
    priority: Priority | Literal["best"],
    lead: tuple[int, ...],
) -> tuple[Schedule, list[int]]:
    """The schedule of all copies, and the in-flight samples that it keeps to by stage."""
    lines: list[list[Task]] = [[] for _ in range(cluster.world_size)]
    in_flight = [stage.in_flight for stage in stages]
    made: dict[PipelineProblem, tuple[list[list[Task]], str, list[int]]] = {}
    used = builder
    for copy in range(copies):
        problem, ranks = _canonical(
            stages, edges, cluster, copy, len(copy_range(copy, copies, batch_size))
        )
        if problem not in made:
            built = build_schedule(
                problem, builder, priority=priority, lead=lead or None, raise_bounds=True
            )
            found = [spec.in_flight for spec in built.problem.stages]
            made[problem] = (built.graph.tasks(built.lines), built.builder, found)
            priority = built.priority  # the same in every copy
        own, used, found = made[problem]
        for rank, line in zip(ranks, own, strict=True):
            lines[rank] = line
        in_flight = [max(pair) for pair in zip(in_flight, found, strict=True)]
    return (
        Schedule.of(
            lines,
            used,
            priority="sample" if priority == "best" else priority,
            lead=lead if used == "list" else (),
        ),
        in_flight,
    )


def _canonical(
    stages: Sequence[Stage],
    edges: Sequence[StageEdge],
    cluster: Cluster,
    copy: int,
    samples: int,
) -> tuple[PipelineProblem, list[int]]:
    """A copy with its ranks numbered in the order in which its stages name them, so that
    copies that are alike are equal; and those ranks."""
    number: dict[int, int] = {}
    specs: list[StageSpec] = []
    for stage in stages:
        devices = stage.devices[copy * stage.replicas : (copy + 1) * stage.replicas]
        times = [stage.times[cluster.devices[rank].kind] for rank in devices if stage.times]
        # Without costs, any times with the usual proportions give a schedule.
        forward = max((t.forward_ns for t in times), default=1000 * stage.micro_batch)
        backward = max((t.backward_ns for t in times), default=2000 * stage.micro_batch)
        specs.append(
            StageSpec(
                stage.micro_batch,
                stage.replicas,
                stage.block,
                stage.in_flight,
                tuple(number.setdefault(rank, len(number)) for rank in devices),
                forward,
                backward if stage.has_backward else 0,
                stage.has_backward,
            )
        )
    light = tuple(edge_spec(edge) for edge in edges)
    return PipelineProblem(tuple(specs), light, samples, len(number)), list(number)


def _given(
    lines: Sequence[Sequence[Task]],
    stages: Sequence[Stage],
    world_size: int,
    copies: int,
    builder: str,
) -> Schedule:
    """The given lists of copy 0, repeated on the ranks of the other copies."""
    out: list[Sequence[Task]] = [()] * world_size
    for copy in range(copies):
        place: dict[int, int] = {}
        for stage in stages:
            for q in range(stage.replicas):
                first, here = stage.devices[q], stage.devices[copy * stage.replicas + q]
                if place.setdefault(first, here) != here:
                    raise PlanError(
                        "Given task lists cannot be repeated: the copies place stages differently",
                        where=f"copy {copy}, stage {stage.name!r}",
                        expected=f"rank {place[first]}, where copy 0 has rank {first}",
                        got=f"rank {here}",
                    )
        for first, here in place.items():
            out[here] = lines[first]
    return Schedule.of(out, "" if builder == "auto" else builder)
