"""Plans and timelines made by hand, for tests of what is shown of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphpipe.cost.cluster import Cluster, Device, Network
from graphpipe.plan.plan import Plan, Prediction, ReduceGroup
from graphpipe.plan.ranges import SampleRange, copy_range, micro_batch_count, micro_batch_range
from graphpipe.plan.schedule import Schedule, Task
from graphpipe.plan.stage import EdgeTensor, Stage, StageEdge, StageMemory, TaskTimes
from graphpipe.simulate.timeline import Event, Timeline, Transfer

GIB = 2**30
KIND = "test-device"
WIRE_NS = 200
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
        network=Network(intra_node_bandwidth=1e11, inter_node_bandwidth=1e10),
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
    """Four branches of 15 stages and a trunk: 64 devices, 256 micro-batches.

    The timeline is not an execution: every device runs F, B, F, B, ... without a pause, later
    the deeper its stage. It has the number of events and messages of one, which is what a test
    of the page at this size is about.
    """
    stages: list[Stage] = []
    edges: list[StageEdge] = []
    depth: list[int] = []
    for branch in range(4):
        for step in range(15):
            number = len(stages)
            stages.append(stage(f"encoder{branch}.layers.{step}", (number,), 4, 4, 1000))
            depth.append(step)
            if step:
                edges.append(edge(number - 1, number))
    for step in range(4):
        number = len(stages)
        stages.append(stage(f"trunk.{step}", (number,), 4, 4, 1000))
        depth.append(15 + step)
        ends = [14, 29, 44, 59] if step == 0 else [number - 1]
        edges += [edge(source, number) for source in ends]
    count = 256
    events = tuple(
        Event(
            rank=rank, kind=kind, stage=rank, micro_batch=i,
            start_ns=depth[rank] * 1000 + i * 3000 + (0 if kind == "F" else 1000),
            end_ns=depth[rank] * 1000 + i * 3000 + (1000 if kind == "F" else 3000),
        )
        for rank in range(64) for i in range(count) for kind in ("F", "B")
    )  # fmt: skip
    transfers = tuple(
        Transfer(
            source=item.source if kind == "F" else item.target,
            target=item.target if kind == "F" else item.source,
            kind=kind, edge=position, nbytes=8192, first_sample=4 * i, last_sample=4 * i + 4,
            start_ns=depth[item.source] * 1000 + i * 3000 + (1000 if kind == "F" else 3000),
            end_ns=depth[item.source] * 1000 + i * 3000 + (1200 if kind == "F" else 3200),
        )
        for position, item in enumerate(edges) for i in range(count) for kind in ("F", "B")
    )  # fmt: skip
    tasks = [[Task(k, rank, i) for i in range(count) for k in ("F", "B")] for rank in range(64)]
    end = max(event.end_ns for event in events)
    plan = Plan(
        model="four encoders", batch_size=4 * count, cluster=cluster(64), stages=tuple(stages),
        edges=tuple(edges), schedule=Schedule.of(tasks, "list"), planner="gpp",
    )  # fmt: skip
    timeline = Timeline(
        world_size=64, iteration_ns=end, events=events, transfers=transfers,
        peak_memory=(5 * GIB,) * 64, peak_in_flight=(4,) * 64,
    )  # fmt: skip
    return plan, timeline


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
    """A plan of these stages with the schedule and the timeline of a greedy execution."""
    state = _Greedy(stages, edges, batch_size, copies)
    state.execute()
    reduce_groups = tuple(
        ReduceGroup(ranks=s.devices, parameters=(f"{s.name}.weight",), nbytes=GIB)
        for s in stages
        if len(s.devices) > 1
    )
    end = max(event.end_ns for event in state.events)
    for group in reduce_groups:
        state.events += [
            Event(rank=rank, kind="all_reduce", start_ns=end, end_ns=end + 3000)
            for rank in group.ranks
        ]
    end = max(event.end_ns for event in state.events)
    used = sorted({rank for s in stages for rank in s.devices})
    state.events += [
        Event(rank=rank, kind="optimizer", start_ns=end, end_ns=end + 500) for rank in used
    ]
    plan = Plan(
        model=model,
        fingerprint="0123456789abcdef",
        batch_size=batch_size,
        copies=copies,
        cluster=cluster(devices),
        stages=stages,
        edges=edges,
        reduce_groups=reduce_groups,
        schedule=Schedule.of((state.lists.get(rank, []) for rank in range(devices)), "list"),
        prediction=Prediction(iteration_ns=end + 500, lower_bound_ns=round(0.9 * end)),
        planner="gpp",
    )
    timeline = Timeline(
        world_size=devices,
        iteration_ns=end + 500,
        events=tuple(state.events),
        transfers=tuple(state.transfers),
        peak_memory=tuple(5 * GIB for _ in range(devices)),
        peak_in_flight=tuple(s.in_flight for s in stages),
        stage_names=tuple(s.name for s in stages),
    )
    return plan, timeline


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


@dataclass
class _Greedy:
    """Every device runs, of the tasks it may run, the one that can start first."""

    stages: tuple[Stage, ...]
    edges: tuple[StageEdge, ...]
    batch_size: int
    copies: int
    events: list[Event] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    lists: dict[int, list[Task]] = field(default_factory=dict)
    begun: dict[tuple[str, int], int] = field(default_factory=dict)

    def execute(self) -> None:
        for copy in range(self.copies):
            self._execute_copy(copy, copy_range(copy, self.copies, self.batch_size))

    def _execute_copy(self, copy: int, owned: SampleRange) -> None:
        self.begun = {}
        ends: dict[Task, int] = {}
        free: dict[int, int] = {}
        while True:
            ready = []
            for number, spec in enumerate(self.stages):
                for kind in "BF":
                    for task in self._next(number, kind, spec, owned):
                        at = self._arrival(task, owned, ends)
                        if at is not None:
                            rank = spec.device_of(copy, task.micro_batch)
                            start = max(at, free.get(rank, 0))
                            ready.append((start, kind, task.micro_batch, number, rank, task))
            if not ready:
                return
            start, kind, _, number, rank, task = min(ready)
            times = self.stages[number].times[KIND]
            end = start + (times.forward_ns if kind == "F" else times.backward_ns)
            ends[task] = free[rank] = end
            self.begun[kind, number] = self.begun.get((kind, number), 0) + 1
            self.lists.setdefault(rank, []).append(task)
            self.events.append(
                Event(
                    rank=rank, kind=task.kind, start_ns=start, end_ns=end,
                    stage=number, micro_batch=task.micro_batch,
                )
            )  # fmt: skip
            self._send(task, copy, owned, end)

    def _next(self, number: int, kind: str, spec: Stage, owned: SampleRange) -> list[Task]:
        count = micro_batch_count(len(owned), spec.micro_batch)
        done, back = self.begun.get(("F", number), 0), self.begun.get(("B", number), 0)
        if kind == "B":
            return [Task("B", number, back)] if spec.has_backward and back < done else []
        if spec.has_backward and (done - back) * spec.micro_batch >= spec.in_flight:
            return []
        return [Task("F", number, done)] if done < count else []

    def _arrival(self, task: Task, owned: SampleRange, ends: dict[Task, int]) -> int | None:
        need = [] if task.kind == "F" else [Task("F", task.stage, task.micro_batch)]
        need += [other for _, other in self._partners(task, owned, incoming=True)]
        if any(other not in ends for other in need):
            return None
        wire = {other: 0 if other.stage == task.stage else WIRE_NS for other in need}
        return max((ends[other] + wire[other] for other in need), default=0)

    def _partners(
        self, task: Task, owned: SampleRange, *, incoming: bool
    ) -> list[tuple[int, Task]]:
        """(edge, task) of the tasks that give to ``task``, or that it gives to."""
        samples = micro_batch_range(owned, self.stages[task.stage].micro_batch, task.micro_batch)
        found = []
        for position, item in enumerate(self.edges):
            here, there = (item.target, item.source), (item.source, item.target)
            mine, other = here if (task.kind == "F") == incoming else there
            if mine != task.stage or (task.kind == "B" and not item.has_gradient):
                continue
            size = self.stages[other].micro_batch
            first, last = samples.start - owned.start, samples.stop - owned.start
            found += [
                (position, Task(task.kind, other, i))
                for i in range(first // size, -(-last // size))
            ]
        return found

    def _send(self, task: Task, copy: int, owned: SampleRange, end: int) -> None:
        mine = micro_batch_range(owned, self.stages[task.stage].micro_batch, task.micro_batch)
        for position, other in self._partners(task, owned, incoming=False):
            theirs = micro_batch_range(
                owned, self.stages[other.stage].micro_batch, other.micro_batch
            )
            first, last = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
            source = self.stages[task.stage].device_of(copy, task.micro_batch)
            target = self.stages[other.stage].device_of(copy, other.micro_batch)
            if source != target:
                self.transfers.append(
                    Transfer(
                        source=source, target=target, kind=task.kind, edge=position, start_ns=end,
                        end_ns=end + WIRE_NS, nbytes=2048 * (last - first), first_sample=first,
                        last_sample=last,
                    )
                )  # fmt: skip
