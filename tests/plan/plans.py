"""Plans made by hand from problems, for tests."""

from __future__ import annotations

from collections.abc import Sequence

from graphpipe.cost.cluster import Cluster, Device, Network
from graphpipe.plan.builders import build_schedule
from graphpipe.plan.plan import Plan, ReduceGroup
from graphpipe.plan.problem import PipelineProblem
from graphpipe.plan.schedule import Schedule, Task
from graphpipe.plan.stage import EdgeTensor, Stage, StageEdge, StageMemory, TaskTimes


def cluster_of(world: int, network: Network | None = None, *, per_node: int = 8) -> Cluster:
    """A cluster of toy devices."""
    return Cluster(
        devices=tuple(
            Device(kind="toy", memory_bytes=10**6, node=rank // per_node) for rank in range(world)
        ),
        network=network if network is not None else Network(),
    )


def plan_of(
    problem: PipelineProblem,
    cluster: Cluster | None = None,
    *,
    copies: int = 1,
    memory: StageMemory | None = None,
    builder: str = "auto",
    reduce_groups: Sequence[ReduceGroup] = (),
    optimizer_ns: Sequence[int] = (),
) -> Plan:
    """A plan whose every copy is ``problem``; copy c runs on ranks c * world_size and up."""
    built = build_schedule(problem, builder, raise_bounds=True)
    lines = built.graph.tasks(built.lines)
    world = problem.world_size
    stages = tuple(
        Stage(
            name=f"s{number}",
            ops=(f"op{number}",),
            micro_batch=spec.micro_batch,
            replicas=spec.replicas,
            devices=tuple(c * world + rank for c in range(copies) for rank in spec.devices),
            block=spec.block,
            in_flight=spec.in_flight,
            has_backward=spec.has_backward,
            times={"toy": TaskTimes(forward_ns=spec.forward_ns, backward_ns=spec.backward_ns)},
            memory=memory if memory is not None else StageMemory(),
        )
        for number, spec in enumerate(built.problem.stages)
    )
    edges = []
    for number, edge in enumerate(problem.edges):
        tensors = []
        if edge.batched:
            tensors.append(
                EdgeTensor(
                    name=f"t{number}",
                    shape=(1,),
                    has_gradient=edge.has_gradient and edge.gradient_batched,
                    bytes_per_sample=edge.forward_bytes,
                    gradient_bytes_per_sample=edge.backward_bytes,
                )
            )
        if not edge.batched or edge.forward_fixed or not edge.gradient_batched:
            tensors.append(
                EdgeTensor(
                    name=f"u{number}",
                    rows_per_sample=None,
                    has_gradient=edge.has_gradient,
                    fixed_bytes=edge.forward_fixed,
                    gradient_fixed_bytes=edge.backward_fixed,
                )
            )
        edges.append(StageEdge(source=edge.source, target=edge.target, tensors=tuple(tensors)))
    all_lines: list[Sequence[Task]] = [line for _ in range(copies) for line in lines]
    return Plan(
        batch_size=problem.samples * copies,
        copies=copies,
        cluster=cluster if cluster is not None else cluster_of(world * copies),
        stages=stages,
        edges=tuple(edges),
        reduce_groups=tuple(reduce_groups),
        optimizer_ns=tuple(optimizer_ns),
        schedule=Schedule.of(all_lines, built.builder),
    )
