from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphpipe.errors import PlanError
from graphpipe.plan.plan import Plan
from graphpipe.report.torch_schedule import chain_order, schedule_csv, torch_schedule_csv
from tests.report import factory


def test_any_plan_is_written_by_rank() -> None:
    plan, _ = factory.two_towers()
    rows = schedule_csv(plan).splitlines()
    assert len(rows) == 7
    assert rows[0].startswith("0F0,0F1,0F2,0B0")
    assert rows[6] == ""


def test_torch_reads_a_chain_back(tmp_path: Path) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    plan, _ = factory.chain(3, 4)
    rows = torch_schedule_csv(plan).splitlines()
    for rank, (row, tasks) in enumerate(zip(rows, plan.schedule.tasks, strict=True)):
        actions = [schedules._Action.from_str(item) for item in row.split(",")]
        assert [str(action) for action in actions] == row.split(",")
        assert [(a.stage_index, a.microbatch_index) for a in actions] == [
            (rank, task.micro_batch) for task in tasks
        ]


def test_stages_are_numbered_along_the_chain_and_idle_ranks_left_out() -> None:
    stages = (
        factory.stage("last", (2,), 1, 1, 10),
        factory.stage("first", (0,), 1, 2, 10),
    )
    plan, _ = factory.run(stages, (factory.edge(1, 0),), 2, 4)
    assert chain_order(plan) == (1, 0)
    assert torch_schedule_csv(plan) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def two_stages(**second: Any) -> Plan:
    stages = (
        factory.stage("a", (0,), 2, 4, 10),
        factory.stage(
            "b", **{"devices": (1,), "micro_batch": 2, "in_flight": 2, **second}, forward_ns=10
        ),
    )
    return factory.run(stages, (factory.edge(0, 1),), 8, 3)[0]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (factory.chain(2, 2, copies=2)[0], "several copies .* Expected 1, got 2"),
        (two_stages(micro_batch=4, in_flight=4), r"mixes micro-batch sizes .* got \[2, 4\]"),
        (two_stages(devices=(1, 2), replicas=2, in_flight=4), r"replicates .*stage 1 \(b\)"),
        (two_stages(has_backward=False), r"without a backward .*stage 1 \(b\)"),
        (two_stages().model_copy(update={"batch_size": 7}), "7 samples in micro-batches of 2"),
        (two_stages().model_copy(update={"edges": ()}), r"one first stage, got stages \[0, 1\]"),
    ],
)
def test_what_torch_cannot_run_is_refused(plan: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        torch_schedule_csv(plan)


def test_a_skip_is_refused() -> None:
    stages = tuple(factory.stage(f"s{i}", (i,), 1, 3 - i, 10) for i in range(3))
    edges = (factory.edge(0, 1), factory.edge(1, 2), factory.edge(0, 2))
    plan, _ = factory.run(stages, edges, 4, 3)
    with pytest.raises(PlanError, match=r"not a chain .*stage 0 \(s0\)\)\. Expected one edge in"):
        torch_schedule_csv(plan)
