"""Each rule of a plan refuses what breaks it, by name."""

from __future__ import annotations

from typing import Any

import pytest

from graphpipe.cost.cluster import Cluster, Device
from graphpipe.errors import GraphPipeError, PlanError, ScheduleError
from graphpipe.graph.model_graph import BatchCondition
from graphpipe.plan.assemble import StageChoice, assemble
from graphpipe.plan.plan import Plan, ReduceGroup
from graphpipe.plan.schedule import Schedule
from graphpipe.plan.validate import problems_of, validate
from tests.plan.graphs import costs_of, two_towers
from tests.plan.plans import cluster_of

GRAPH = two_towers()
CHOICES = [
    StageChoice(("i1", "i2"), 2, 1, (0,)),
    StageChoice(("t1", "t2"), 2, 1, (1,)),
    StageChoice(("join", "loss"), 2, 1, (2,)),
]


def good() -> Plan:
    return assemble(GRAPH, costs_of(GRAPH), cluster_of(4), CHOICES, batch_size=8)


def changed(**fields: Any) -> Plan:
    return Plan(**{**dict(good()), **fields})


def with_stage(number: int, **fields: Any) -> Plan:
    stages = list(good().stages)
    stages[number] = type(stages[number])(**{**dict(stages[number]), **fields})
    return changed(stages=tuple(stages))


def with_line(rank: int, line: str) -> Plan:
    lines = list(good().schedule.lines)
    lines[rank] = line
    return changed(schedule=Schedule(lines=tuple(lines)))


def with_edge(number: int, **fields: Any) -> Plan:
    edges = list(good().edges)
    edges[number] = type(edges[number])(**{**dict(edges[number]), **fields})
    return changed(edges=tuple(edges))


def with_tensor(**fields: Any) -> Plan:
    tensor = good().edges[0].tensors[0]
    return with_edge(0, tensors=(type(tensor)(**{**dict(tensor), **fields}),))


def test_a_good_plan_passes_with_and_without_its_graph() -> None:
    validate(good(), GRAPH)
    validate(good())


BROKEN = {
    "unknown device": (
        with_stage(0, devices=(7,)),
        r"stage 'image'.*ranks 0 to 3.*\[7\]",
    ),
    "wrong number of devices": (with_stage(0, devices=(0, 3)), r"'image'.*1 x 1 devices"),
    "micro-batch too large": (with_stage(0, micro_batch=16), r"'image'.*at most 8.*16"),
    "sizes that do not divide": (
        with_stage(2, micro_batch=3),
        r"neighbouring.*'image' and 'join \+ loss'.*2 and 3 samples",
    ),
    "more copies than samples": (changed(copies=9), r"more copies than samples"),
    "edge to nowhere": (with_edge(1, target=9), r"edge 1.*stages 0 to 2.*1 -> 9"),
    "edge twice": (
        changed(edges=(*good().edges, good().edges[0])),
        r"Two edges.*edge 2, 0 -> 2",
    ),
    "cycle": (
        changed(
            edges=(
                *good().edges,
                type(good().edges[0])(source=2, target=0, tensors=good().edges[0].tensors),
            ),
        ),
        r"cycle.*'image' -> 'join \+ loss' by 'i2'; 'join \+ loss' -> 'image'",
    ),
    "table too short": (changed(optimizer_ns=(1,)), r"field 'optimizer_ns'.*4 entries.*1"),
    "reduce group outside": (
        changed(reduce_groups=(ReduceGroup(ranks=(0, 9), parameters=("i1.w",), nbytes=1),)),
        r"reduce group 0.*\[0, 9\]",
    ),
    "parameter reduced twice": (
        changed(
            reduce_groups=(
                ReduceGroup(ranks=(0, 1), parameters=("i1.w",), nbytes=1),
                ReduceGroup(ranks=(0, 2), parameters=("i1.w",), nbytes=1),
            )
        ),
        r"'i1.w'.*groups 0 and 1",
    ),
    "lists missing": (
        changed(schedule=Schedule(lines=("F0.0",))),
        r"list for each device.*4 lists.*got 1",
    ),
    "task missing": (
        with_line(0, "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"),
        r"missing from the schedule \(at F0.3, B0.3\)",
    ),
    "task on the wrong device": (
        with_line(3, "F0.0"),
        r"without a stage \(at rank 3\)|wrong device.*rank 3",
    ),
    "bound exceeded": (
        with_line(0, "F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3"),
        r"in-flight bound.*rank 0, task F0.2.*at most 2 micro-batches \(W = 4",
    ),
    "backward first": (
        with_line(2, "B2.0 F2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3"),
        r"backward comes before its forward \(at rank 2, task B2.0\)",
    ),
    "out of order": (
        with_line(0, "F0.1 F0.0 B0.0 B0.1 F0.2 F0.3 B0.2 B0.3"),
        r"in order.*rank 0, task F0.0",
    ),
    "memory": (
        changed(
            cluster=Cluster(devices=tuple(Device(kind="toy", memory_bytes=950) for _ in range(4)))
        ),
        r"more memory.*rank 1 \(toy\) with stage 'text'.*at most 950.*1120 for parameters",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plans_are_refused_by_name(name: str) -> None:
    plan, message = BROKEN[name]
    with pytest.raises(PlanError, match=message):
        validate(plan)


OF_GRAPH = {
    "other graph": (
        changed(fingerprint="0123456789abcdef"),
        r"another graph.*0123456789abcdef",
    ),
    "op missing": (with_stage(0, ops=("i1",)), r"in no stage \(at 'i2'\)"),
    "op doubled": (with_stage(0, ops=("i1", "i2", "t2")), r"'t2' in stages 0, 1"),
    "op unknown": (with_stage(0, ops=("i1", "i2", "ghost")), r"'ghost' in stage 0"),
    "ops out of order": (with_stage(0, ops=("i2", "i1")), r"graph's order.*'i1', 'i2'"),
    "prep op listed": (with_stage(1, ops=("mask", "t1", "t2")), r"without prep ops"),
    "backward denied": (with_stage(0, has_backward=False), r"whether it has a backward.*'image'"),
    "edge missing": (changed(edges=good().edges[:1]), r"tensor 't2' \(at edge 1 -> 2\)"),
    "tensor renamed": (with_tensor(name="i9"), r"tensor 'i2' \(at edge 0 -> 2\)"),
    "tensor of another shape": (with_tensor(shape=(1, 5)), r"float32 \[1, 4\].*float32 \[1, 5\]"),
    "tensor of another dtype": (with_tensor(dtype="int64"), r"got int64"),
    "gradient denied": (with_tensor(has_gradient=False), r"with gradient.*got.*without gradient"),
    "input missing": (changed(inputs=good().inputs[:2]), r"number of inputs"),
    "input read by others": (
        changed(
            inputs=(
                type(good().inputs[0])(**{**dict(good().inputs[0]), "stages": (1,)}),
                *good().inputs[1:],
            )
        ),
        r"signature \(at input 'image'\)",
    ),
    "reduce group of a parameter that nobody shares": (
        changed(reduce_groups=(ReduceGroup(ranks=(0, 1), parameters=("i1.w",), nbytes=1),)),
        r"'i1.w'.*Expected none, got \(0, 1\)",
    ),
}


@pytest.mark.parametrize("name", OF_GRAPH)
def test_plans_that_do_not_fit_the_graph_are_refused_by_name(name: str) -> None:
    plan, message = OF_GRAPH[name]
    with pytest.raises(PlanError, match=message):
        validate(plan, GRAPH)


def test_atomic_groups_stay_whole() -> None:
    graph = two_towers(i1={"group": 7}, i2={"group": 7})
    choices = [
        StageChoice(("i1",), 2, 1, (0,)),
        StageChoice(("i2", "t1", "t2", "join", "loss"), 2, 1, (1,)),
    ]
    plan = assemble(graph, None, cluster_of(2), choices, batch_size=8)
    with pytest.raises(PlanError, match=r"stay together.*'i1' in 'image \(part\)', 'i2' in"):
        validate(plan, graph)


def test_values_that_may_not_cross_are_named() -> None:
    graph = two_towers(i1={"crossable": False})
    choices = [
        StageChoice(("i1",), 2, 1, (0,)),
        StageChoice(("i2", "t1", "t2", "join", "loss"), 2, 1, (1,), name="rest"),
    ]
    plan = assemble(graph, None, cluster_of(2), choices, batch_size=8)
    with pytest.raises(PlanError, match=r"op 'i1' \(module image\), read by stage 'rest'"):
        validate(plan, graph)


def test_a_cycle_shows_even_where_the_plan_hides_its_edges() -> None:
    stages = list(good().stages)
    stages[0] = type(stages[0])(**{**dict(stages[0]), "ops": ("i1", "join", "loss")})
    stages[2] = type(stages[2])(**{**dict(stages[2]), "ops": ("i2",)})
    plan = changed(stages=tuple(stages), edges=())
    with pytest.raises(PlanError, match=r"cycle.*'i1'|cycle.*'i2'"):
        validate(plan, GRAPH)


def test_a_device_in_two_copies_is_refused() -> None:
    choices = [c._replace(devices=(r, r + 3)) for r, c in enumerate(CHOICES)]
    plan = assemble(GRAPH, None, cluster_of(6), choices, batch_size=8, copies=2)
    stages = list(plan.stages)
    stages[1] = type(stages[1])(**{**dict(stages[1]), "devices": (3, 0)})
    with pytest.raises(PlanError, match=r"two copies.*rank 0|two copies.*rank 3"):
        validate(Plan(**{**dict(plan), "stages": tuple(stages)}))


def test_deadlock_is_refused_with_the_tasks_that_wait() -> None:
    lines = list(good().schedule.lines)
    lines[2] = "F2.0 F2.1 F2.2 F2.3 B2.0 B2.1 B2.2 B2.3"
    stages = list(good().stages)
    stages[2] = type(stages[2])(**{**dict(stages[2]), "in_flight": 8})
    plan = changed(stages=tuple(stages), schedule=Schedule(lines=tuple(lines)))
    with pytest.raises(ScheduleError, match=r"deadlocks.*rank 0 at B0.0 waits for B2.0"):
        validate(plan)


def test_all_problems_are_counted() -> None:
    plan = Plan(**{**dict(with_stage(0, devices=(7,))), "optimizer_ns": (1,)})
    assert len(list(problems_of(plan))) == 2
    with pytest.raises(PlanError, match=r"Further problems: A table by rank"):
        validate(plan)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"batch_size": 8', '"batch_size": 0', "batch_size"),
        ('"batch_size": 8', '"batch_size": "8"', "batch_size"),
        ('"copies": 1', '"copies": NaN', "copies"),
        ('"F0.0 F0.1', '"F0.0 X0.1', "schedule.lines"),
        ('"replicas": 1', '"replicas": 2', "stages.0"),
        ('"kind": "graphpipe-plan"', '"kind": "graphpipe-plan", "colour": 1', "colour"),
        ('"version": 1,\n "model"', '"version": 2,\n "model"', "version"),
    ],
)
def test_malformed_files_are_refused_by_field(old: str, new: str, field: str) -> None:
    text = good().to_json()
    assert old in text
    with pytest.raises(GraphPipeError, match=f"field '{field}"):
        Plan.from_json(text.replace(old, new, 1))


def test_truncated_files_are_refused() -> None:
    text = good().to_json()
    for length in range(0, len(text) - 1, 211):
        with pytest.raises(GraphPipeError):
            Plan.from_json(text[:length])


@pytest.mark.parametrize(
    ("batch_size", "micro_batch", "least", "smallest"),
    [(8, 2, 3, 2), (9, 2, 2, 1), (8, 8, 9, 8)],
)
def test_micro_batches_that_an_op_does_not_accept_are_refused(
    batch_size: int, micro_batch: int, least: int, smallest: int
) -> None:
    condition = BatchCondition(op="join", min_samples=least, message="join wants company")
    graph = GRAPH.model_copy(update={"batch_conditions": (condition,)})
    # The other stages hold no such op: their sizes do not matter.
    choices = [*CHOICES[:2], StageChoice(("join", "loss"), micro_batch, 1, (2,))]
    plan = assemble(graph, costs_of(graph), cluster_of(4), choices, batch_size=batch_size)
    with pytest.raises(PlanError, match="join wants company") as caught:
        validate(plan, graph)
    assert caught.value.got == smallest
    assert "op 'join'" in str(caught.value)
    enough = condition.model_copy(update={"min_samples": smallest})
    graph = GRAPH.model_copy(update={"batch_conditions": (enough,)})
    plan = assemble(graph, costs_of(graph), cluster_of(4), choices, batch_size=batch_size)
    validate(plan, graph)
