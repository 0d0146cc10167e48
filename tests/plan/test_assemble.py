"""Plans from partitions: everything that follows is derived, and is right."""

from __future__ import annotations

import numpy as np
import pytest

from graphpipe.cost.cluster import Cluster, Device
from graphpipe.cost.table import Exclusion
from graphpipe.errors import CostError, InfeasibleError, PlanError
from graphpipe.plan.assemble import StageChoice, assemble
from graphpipe.plan.plan import Plan, ReduceGroup
from graphpipe.plan.schedule import Task, parse_task
from graphpipe.plan.stage import TaskTimes
from graphpipe.plan.validate import validate
from tests.plan.graphs import costs_of, two_towers
from tests.plan.plans import cluster_of


def choices(
    b: tuple[int, int, int] = (2, 2, 2),
    devices: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,)),
    replicas: tuple[int, int, int] = (1, 1, 1),
) -> list[StageChoice]:
    ops = (("i1", "i2"), ("t1", "t2"), ("join", "loss"))
    return [
        StageChoice(ops=ops[s], micro_batch=b[s], replicas=replicas[s], devices=devices[s])
        for s in range(3)
    ]


def make(stages: list[StageChoice] | None = None, world: int = 3, **options: object) -> Plan:
    graph = two_towers()
    plan = assemble(
        graph,
        costs_of(graph),
        cluster_of(world),
        stages if stages is not None else choices(),
        **{"batch_size": 8, **options},  # type: ignore[arg-type]
    )
    validate(plan, graph)
    return plan


def test_everything_is_derived() -> None:
    plan = make()
    graph = two_towers()
    assert (plan.model, plan.fingerprint) == ("two towers", graph.fingerprint)
    assert [stage.name for stage in plan.stages] == ["image", "text", "join + loss"]
    assert [stage.modules for stage in plan.stages] == [("image",), ("text",), ("join", "loss")]
    assert [stage.in_flight for stage in plan.stages] == [4, 4, 2]
    assert [(e.source, e.target) for e in plan.edges] == [(0, 2), (1, 2)]
    assert {i.name: i.stages for i in plan.inputs} == {"image": (0,), "text": (1,), "label": (2,)}
    # 2 ops x 2 samples x 1 us forward and 2 us backward.
    assert plan.stages[0].times == {"toy": TaskTimes(forward_ns=4000, backward_ns=8000)}
    memory = plan.stages[0].memory
    assert (memory.parameters, memory.gradients, memory.optimizer) == (120, 120, 240)
    # What two ops keep, and what the stage hands on: i2's 2 x 4 floats, which no op keeps.
    assert (memory.saved_per_micro_batch, memory.recompute) == (2 * (10 + 2 * 32) + 32, 0)
    assert memory.workspace == 7
    assert plan.static_memory == (4 * 120, 4 * 280, 4 * 200)
    assert plan.optimizer_ns == (120, 280, 200)
    assert plan.reduce_groups == ()
    assert plan.schedule.builder == "kfkb"
    assert plan.schedule.lines[2] == "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3"


def test_the_same_input_gives_the_same_plan_and_it_survives_json() -> None:
    plan = make()
    assert plan.to_json() == make().to_json()
    assert Plan.from_json(plan.to_json()) == plan


def test_recomputation_keeps_inputs_and_pays_with_time() -> None:
    stages = choices()
    stages[2] = stages[2]._replace(recompute=True)
    plan = make(stages)
    assert plan.stages[2].times["toy"] == TaskTimes(forward_ns=4000, backward_ns=12000)
    memory = plan.stages[2].memory
    assert memory.saved_per_micro_batch == 2 * (16 + 16)
    assert memory.recompute == 2 * (10 + 2 * 32)


def test_replicas_copies_and_ties_reduce_over_all_holders() -> None:
    stages = choices(devices=((0, 1, 4, 5), (2, 6), (3, 7)), replicas=(2, 1, 1))
    plan = make(stages, world=8, copies=2)
    assert plan.reduce_groups == (
        ReduceGroup(ranks=(0, 1, 4, 5), parameters=("i1.w", "i2.w"), nbytes=120),
        ReduceGroup(ranks=(2, 6), parameters=("t1.w", "t2.w"), nbytes=280),
        ReduceGroup(ranks=(3, 7), parameters=("join.w",), nbytes=200),
    )
    tied = two_towers(join={"parameters": ("join.w", "i1.w")})
    plan = assemble(tied, costs_of(tied), cluster_of(3), choices(), batch_size=8)
    assert plan.reduce_groups == (ReduceGroup(ranks=(0, 2), parameters=("i1.w",), nbytes=40),)
    validate(plan, tied)


def test_a_parameter_counts_once_for_a_device() -> None:
    tied = two_towers(join={"parameters": ("join.w", "i1.w")})
    stages = choices(devices=((0,), (1,), (0,)))
    plan = assemble(tied, costs_of(tied), cluster_of(2), stages, batch_size=8)
    assert plan.static_memory == (4 * (40 + 80 + 200), 4 * 280)
    assert sum(plan.stages[s].memory.static for s in (0, 2)) == 4 * (40 + 80 + 200 + 40)
    assert plan.optimizer_ns == (320, 280)
    assert plan.reduce_groups == ()
    assert plan.schedule.builder == "list"


def test_frozen_stage_has_no_backward() -> None:
    frozen = {"requires_grad": False}
    graph = two_towers(i1=frozen, i2=frozen)
    plan = assemble(graph, costs_of(graph), cluster_of(3), choices(), batch_size=8)
    validate(plan, graph)
    stage = plan.stages[0]
    assert not stage.has_backward
    assert stage.times["toy"].backward_ns == 0
    assert stage.memory.saved_per_micro_batch == 0
    assert not plan.edges[0].has_gradient
    assert "B0" not in plan.schedule.lines[0]


def test_bounds_may_be_chosen() -> None:
    stages = choices()
    stages[0] = stages[0]._replace(in_flight=8, block=2)
    stages[1] = stages[1]._replace(slack=1)
    plan = make(stages)
    assert [(s.in_flight, s.block) for s in plan.stages] == [(8, 2), (6, 1), (2, 1)]


def test_copies_that_are_alike_get_the_same_lists() -> None:
    stages = choices(devices=((0, 3), (1, 4), (2, 5)))
    plan = make(stages, world=6, copies=2)
    assert plan.schedule.lines[:3] == plan.schedule.lines[3:]
    uneven = make(stages, world=6, copies=2, batch_size=9)
    assert uneven.schedule.lines[0] != uneven.schedule.lines[3]


def test_given_lists_are_kept_and_repeated() -> None:
    line: list[list[Task]] = [
        [parse_task(item) for item in text.split()]
        for text in (
            "F0.0 F0.1 B0.0 B0.1",
            "F1.0 F1.1 B1.0 B1.1",
            "F2.0 F2.1 B2.0 B2.1",
        )
    ]
    stages = [c._replace(in_flight=4) for c in choices(devices=((0, 3), (1, 4), (2, 5)))]
    plan = make(stages, world=6, copies=2, lines=line, builder="mine")
    assert plan.schedule.builder == "mine"
    assert plan.schedule.lines[5] == "F2.0 F2.1 B2.0 B2.1"


def test_kinds_of_devices_have_times_of_their_own() -> None:
    graph = two_towers()
    cluster = Cluster(
        devices=tuple(Device(kind=kind, memory_bytes=10**6) for kind in ("toy", "slow", "toy"))
    )
    costs = costs_of(graph, kinds=("toy", "slow"))
    stages = choices(devices=((0, 1), (2,), (2,)), replicas=(2, 1, 1))
    plan = assemble(graph, costs, cluster, stages, batch_size=8)
    assert {k: t.forward_ns for k, t in plan.stages[0].times.items()} == {"toy": 4000, "slow": 8000}
    assert set(plan.stages[1].times) == {"toy"}


def test_without_costs_the_plan_has_no_predictions_but_runs() -> None:
    graph = two_towers()
    plan = assemble(graph, None, cluster_of(3), choices(), batch_size=8)
    validate(plan, graph)
    assert plan.stages[0].times == {}
    assert plan.schedule.lines == make().schedule.lines


def test_one_note_about_ops_that_mix_samples() -> None:
    graph = two_towers(loss={"coupled": True}, join={"coupled": True})
    plan = assemble(graph, None, cluster_of(3), choices(), batch_size=8)
    (note,) = plan.notes
    assert "join (toy) and 1 more in stage 'join + loss'" in note
    assert "micro_batch = 8" in note
    whole = assemble(graph, None, cluster_of(3), choices(b=(2, 2, 8)), batch_size=8)
    assert whole.notes == ()
    assert [stage.in_flight for stage in whole.stages] == [8, 8, 8]


def test_names_are_unique() -> None:
    stages = [
        StageChoice(("i1",), 2, 1, (0,)),
        StageChoice(("i2",), 2, 1, (1,)),
        StageChoice(("t1", "t2", "join", "loss"), 2, 1, (2,), name="image"),
    ]
    assert [s.name for s in make(stages).stages] == ["image (part)", "image (part) (2)", "image"]


def test_cycles_are_refused_by_name() -> None:
    stages = [
        StageChoice(("i1", "join", "loss"), 2, 1, (0,), name="ends"),
        StageChoice(("i2", "t1", "t2"), 2, 1, (1,), name="middle"),
    ]
    with pytest.raises(PlanError, match=r"cycle.*ends -> middle -> ends"):
        make(stages)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (choices(devices=((0, 1), (1,), (2,))), r"stage 0.*1 x 1 devices.*2: \[0, 1\]"),
        (choices(devices=((0,), (9,), (2,))), r"stage 1.*ranks 0 to 2.*\[9\]"),
        ([], "needs a stage"),
    ],
)
def test_wrong_devices_are_refused(stages: list[StageChoice], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make(stages)


def test_costs_of_another_graph_are_refused() -> None:
    with pytest.raises(CostError, match="another graph"):
        assemble(
            two_towers(), costs_of(two_towers(loss={"coupled": True})), cluster_of(3), choices(),
            batch_size=8,
        )  # fmt: skip


def test_a_size_that_cannot_run_is_refused_with_the_reason() -> None:
    graph = two_towers()
    costs = costs_of(graph)
    blocked = type(costs)(
        **{
            **{k: getattr(costs, k) for k in costs.__dataclass_fields__},
            "exclusions": (Exclusion("t1", 2, "out of memory"),),
        }
    )
    assert np.isinf(blocked.op_seconds("toy", 2)[0]).sum() == 1
    with pytest.raises(InfeasibleError, match=r"'t1' cannot run.*2 samples.*out of memory"):
        assemble(graph, blocked, cluster_of(3), choices(), batch_size=8)
