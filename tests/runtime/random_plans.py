"""Random plans without a model: what emulation needs."""

from __future__ import annotations

import random
from collections.abc import Sequence

from graphpipe.cost.cluster import Cluster, Device, Network
from graphpipe.plan.builders import build_schedule
from graphpipe.plan.plan import Plan, ReduceGroup
from graphpipe.plan.problem import PipelineProblem
from graphpipe.plan.schedule import Schedule, Task
from graphpipe.plan.stage import EdgeTensor, Stage, StageEdge, TaskTimes
from tests.plan.random_problems import random_problem


def random_plan(seed: int, *, most_stages: int = 7, shared: bool = True) -> Plan:
    """A valid plan with random stages, edges, copies, times and network."""
    rng = random.Random(seed)
    problem = random_problem(seed, most_stages=most_stages, shared=shared)
    built = build_schedule(problem, "list", raise_bounds=True)
    problem = built.problem
    copies = rng.choice([1, 1, 2])
    width = problem.world_size
    lines: list[Sequence[Task]] = []
    for _ in range(copies):
        lines += built.graph.tasks(built.lines)
    cluster = Cluster(
        devices=tuple(
            Device(kind="d", memory_bytes=1, node=rank // 3) for rank in range(width * copies)
        ),
        network=Network(
            intra_node_bandwidth=rng.choice([None, 3e9, 4e10]),
            intra_node_latency=rng.choice([0.0, 7e-9]),
            inter_node_bandwidth=rng.choice([None, 1e9, 2e9]),
            inter_node_latency=rng.choice([0.0, 5e-8]),
        ),
    )
    return Plan(
        batch_size=problem.samples * copies,
        copies=copies,
        cluster=cluster,
        stages=_stages(problem, copies),
        edges=_edges(problem),
        reduce_groups=_groups(rng, width * copies),
        optimizer_ns=tuple(rng.choice([0, 5]) for _ in range(width * copies)),
        schedule=Schedule.of(lines, "list"),
    )


def _stages(problem: PipelineProblem, copies: int) -> tuple[Stage, ...]:
    return tuple(
        Stage(
            name=f"s{i}",
            ops=(f"op{i}",),
            micro_batch=spec.micro_batch,
            replicas=spec.replicas,
            devices=tuple(
                rank + copy * problem.world_size for copy in range(copies) for rank in spec.devices
            ),
            block=spec.block,
            in_flight=spec.in_flight,
            has_backward=spec.has_backward,
            times={"d": TaskTimes(forward_ns=spec.forward_ns, backward_ns=spec.backward_ns)},
        )
        for i, spec in enumerate(problem.stages)
    )


def _edges(problem: PipelineProblem) -> tuple[StageEdge, ...]:
    edges: list[StageEdge] = []
    for number, spec in enumerate(problem.edges):
        tensors: list[EdgeTensor] = []
        if spec.batched:
            tensors.append(
                EdgeTensor(
                    name=f"t{number}",
                    shape=(1,),
                    has_gradient=spec.has_gradient and spec.gradient_batched,
                    bytes_per_sample=spec.forward_bytes,
                    gradient_bytes_per_sample=spec.backward_bytes,
                )
            )
        if spec.forward_fixed or not spec.batched:
            tensors.append(
                EdgeTensor(
                    name=f"w{number}",
                    shape=(1,),
                    rows_per_sample=None,
                    has_gradient=spec.has_gradient,
                    fixed_bytes=spec.forward_fixed,
                    gradient_fixed_bytes=spec.backward_fixed,
                )
            )
        edges.append(StageEdge(source=spec.source, target=spec.target, tensors=tuple(tensors)))
    return tuple(edges)


def _groups(rng: random.Random, world: int) -> tuple[ReduceGroup, ...]:
    groups: list[ReduceGroup] = []
    for number in range(rng.choice([0, 1, 3])):
        if world < 2:
            break
        ranks = tuple(sorted(rng.sample(range(world), rng.randint(2, world))))
        groups.append(
            ReduceGroup(ranks=ranks, parameters=(f"p{number}",), nbytes=rng.randint(0, 500))
        )
    return tuple(groups)
