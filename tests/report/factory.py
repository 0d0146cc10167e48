"""Plans and timelines made by hand, for tests of what is shown of them."""

from __future__ import annotations

from graphpipe.cost.cluster import Cluster, Device, Network
from graphpipe.plan.builders.list_schedule import list_schedule
from graphpipe.plan.plan import Plan, ReduceGroup
from graphpipe.plan.problem import problem_of
from graphpipe.plan.schedule import Schedule, Task
from graphpipe.plan.stage import EdgeTensor, Stage, StageEdge, StageMemory, TaskTimes
from graphpipe.simulate.predict import prediction_of
from graphpipe.simulate.simulator import simulate
from graphpipe.simulate.timeline import Timeline

GIB = 2**30
KIND = "test-device"
NASTY = (
    '</script><script>document.title="owned"</script><img src=x onerror="alert(1)">\'"&amp;\u2028'
)
"""A name that would run a script if it were taken for markup."""


def stage(
    name: str,
    devices: tuple[int, ...],
    micro_batch: int,
    in_flight: int,
    forward_ns: int,
    *,
    replicas: int = 1,
    block: int = 1,
    recompute: bool = False,
    has_backward: bool = True,
    modules: tuple[str, ...] = (),
) -> Stage:
    backward_ns = (2 + recompute) * forward_ns if has_backward else 0
    return Stage(
        name=name,
        ops=tuple(f"{name}_op_{index}" for index in range(3)),
        modules=modules or (name,),
        micro_batch=micro_batch,
        replicas=replicas,
        devices=devices,
        block=block,
        in_flight=in_flight,
        has_backward=has_backward,
        recompute=recompute,
        times={KIND: TaskTimes(forward_ns=forward_ns, backward_ns=backward_ns)},
        memory=StageMemory(
            parameters=GIB,
            gradients=GIB,
            optimizer=2 * GIB,
            saved_per_micro_batch=GIB // 4,
            recompute=GIB // 2 if recompute else 0,
            workspace=GIB // 16,
        ),
    )


def edge(source: int, target: int, *, has_gradient: bool = True) -> StageEdge:
    tensor = EdgeTensor(
        name=f"hidden_{source}_{target}",
        shape=(1, 512),
        has_gradient=has_gradient,
        bytes_per_sample=2048.0,
        gradient_bytes_per_sample=2048.0 if has_gradient else 0.0,
    )
    return StageEdge(source=source, target=target, tensors=(tensor,))


def cluster(count: int, per_node: int = 8) -> Cluster:
    return Cluster(
        name=f"{count} test devices",
        devices=tuple(
            Device(kind=KIND, memory_bytes=16 * GIB, node=rank // per_node) for rank in range(count)
        ),
        network=Network(
            intra_node_bandwidth=1e11,
            intra_node_latency=1e-7,
            inter_node_bandwidth=1e10,
            inter_node_latency=2e-7,
        ),
    )


def two_towers() -> tuple[Plan, Timeline]:
    """Two branches of two stages and a head with two replicas; 7 devices, one of them idle."""
    stages = (
        stage("image.0", (0,), 2, 6, 900, recompute=True, modules=("image.patch", "image.0")),
        stage("image.1", (1,), 2, 4, 1000),
        stage("text.0", (2,), 4, 12, 1500),
        stage("text.1", (3,), 4, 8, 1600),
        stage("head", (4, 5), 2, 4, 1900, replicas=2),
    )
    edges = (edge(0, 1), edge(1, 4), edge(2, 3), edge(3, 4))
    return run(stages, edges, batch_size=32, devices=7, model="two-towers")


def chain(length: int, micro_batches: int, *, copies: int = 1) -> tuple[Plan, Timeline]:
    """A chain of equal stages, one a device."""
    stages = tuple(
        stage(
            f"layer.{i}",
            tuple(c * length + i for c in range(copies)),
            1,
            min(length - i, micro_batches),
            1000,
        )
        for i in range(length)
    )
    edges = tuple(edge(i, i + 1) for i in range(length - 1))
    return run(stages, edges, micro_batches * copies, length * copies, copies=copies, model="chain")


def large() -> tuple[Plan, Timeline]:
    """Four branches of 15 stages and a trunk of four: 64 devices, 256 micro-batches."""
    stages: list[Stage] = []
    edges: list[StageEdge] = []
    for branch in range(4):
        for step in range(15):
            number = len(stages)
            name = f"encoder{branch}.layers.{step}"
            stages.append(stage(name, (number,), 4, 4 * (19 - step), 50_000 + 1000 * branch))
            if step:
                edges.append(edge(number - 1, number))
    for step in range(4):
        number = len(stages)
        stages.append(stage(f"trunk.{step}", (number,), 4, 4 * (4 - step), 53_000))
        ends = [14, 29, 44, 59] if step == 0 else [number - 1]
        edges += [edge(source, number) for source in ends]
    return run(tuple(stages), tuple(edges), 1024, 64, model="four encoders")


def hostile() -> tuple[Plan, Timeline]:
    """Two stages and a model whose names try to leave the page's data."""
    stages = (
        stage(NASTY, (0,), 1, 2, 1000, modules=(NASTY,)),
        stage("plain", (1,), 1, 1, 1000),
    )
    return run(stages, (edge(0, 1),), 4, 2, model=NASTY)


def run(
    stages: tuple[Stage, ...],
    edges: tuple[StageEdge, ...],
    batch_size: int,
    devices: int,
    *,
    copies: int = 1,
    model: str = "model",
) -> tuple[Plan, Timeline]:
    """A plan of these stages with a schedule and a prediction, and its simulated timeline."""
    used = {rank for s in stages for rank in s.devices}
    draft = Plan(
        model=model,
        fingerprint="0123456789abcdef",
        batch_size=batch_size,
        copies=copies,
        cluster=cluster(devices),
        stages=stages,
        edges=edges,
        reduce_groups=tuple(
            ReduceGroup(ranks=s.devices, parameters=(f"{s.name}.weight",), nbytes=100_000)
            for s in stages
            if len(s.devices) > 1
        ),
        optimizer_ns=tuple(500 * (rank in used) for rank in range(devices)),
        schedule=Schedule(lines=("",) * devices),
        planner="gpp",
    )
    lines: list[list[Task]] = [[] for _ in range(devices)]
    for copy in range(copies):
        built = list_schedule(problem_of(draft, copy)[0])
        for line, tasks in zip(lines, built.graph.tasks(built.lines), strict=True):
            line += tasks
    plan = draft.model_copy(update={"schedule": Schedule.of(lines, "list")})
    timeline = simulate(plan)
    prediction = prediction_of(plan, timeline, lower_bound_ns=timeline.iteration_ns * 4 // 5)
    return plan.model_copy(update={"prediction": prediction}), timeline


def measured_of(timeline: Timeline, slower: float = 1.1) -> Timeline:
    """The same iteration as if measured, stretched."""
    return Timeline(
        world_size=timeline.world_size,
        iteration_ns=round(timeline.iteration_ns * slower),
        network="measured",
        events=tuple(
            event.model_copy(
                update={
                    "start_ns": round(event.start_ns * slower),
                    "end_ns": round(event.end_ns * slower),
                }
            )
            for event in timeline.events
        ),
    )
