"""Random valid partitions with random sizes, replicas, copies, devices and recomputation."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest
import torch

from graphpipe.cost.cluster import Cluster, Device
from graphpipe.errors import PlanError
from graphpipe.graph.cut import partition_ops
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.assemble import StageChoice, assemble
from graphpipe.plan.plan import Plan
from graphpipe.plan.validate import validate
from tests.runtime.equality import (
    History,
    assert_same,
    example,
    pipeline_run,
    sgd,
    single_process,
)

MODELS = ("chain", "diamond", "unequal", "skip", "tied", "frozen", "several", "whole")
SIZES = (1, 2, 3, 4, 6, 12)
STEPS = 2


def random_levels(graph: ModelGraph, rng: random.Random) -> list[list[str]]:
    """A random partition without cycles: numbers that never fall along an edge; of the ops
    with one number, those that are not connected are stages of their own."""
    step = rng.choice([0.1, 0.3, 0.6])
    level: dict[str, int] = {}
    names = partition_ops(graph)
    jump = {name: int(rng.random() < step) for name in names}
    changed = True
    while changed:  # a group that moved up moves what reads it
        changed = False
        groups: dict[int, int] = {}
        for name in names:
            op = graph.op_by_name[name]
            before = [level[item] for item in op.inputs if item in level]
            here = max([*before, level.get(name, 0)], default=0)
            if name not in level:
                here += jump[name]
            if op.group is not None:
                here = max(here, groups.get(op.group, 0))
                groups[op.group] = here
            changed |= level.get(name) != here
            level[name] = here
        for name in names:
            group = graph.op_by_name[name].group
            if group is not None and level[name] != groups[group]:
                level[name] = groups[group]
                changed = True
    return _components(graph, level)


def _components(graph: ModelGraph, level: dict[str, int]) -> list[list[str]]:
    root = {name: name for name in level}

    def find(name: str) -> str:
        while root[name] != name:
            name = root[name]
        return name

    first_of_group: dict[int, str] = {}
    for name in level:
        op = graph.op_by_name[name]
        near = [item for item in op.inputs if level.get(item) == level[name]]
        if op.group is not None:
            near.append(first_of_group.setdefault(op.group, name))
        for item in near:
            root[find(item)] = find(name)
    stages: dict[str, list[str]] = {}
    for name in level:
        stages.setdefault(find(name), []).append(name)
    return list(stages.values())


def random_plan(graph: ModelGraph, seed: int) -> Plan | None:
    """A random plan; None where the draw breaks a rule (sizes that do not divide, say)."""
    rng = random.Random(seed)
    parts = random_levels(graph, rng)
    copies = rng.choice([1, 1, 1, 2])
    base = rng.choice(SIZES)
    related = [b for b in SIZES if b % base == 0 or base % b == 0]
    used = 0
    choices: list[StageChoice] = []
    shared = rng.random() < 0.4
    width = rng.randint(1, 3)
    for ops in parts:
        replicas = rng.choice([1, 1, 2, 3])
        if shared:
            replicas = min(replicas, width)
            place = tuple(rng.sample(range(width), replicas))
        else:
            place = tuple(range(used, used + replicas))
        used = max(used, max(place) + 1)
        choices.append(
            StageChoice(
                tuple(ops), rng.choice(related), replicas, place, recompute=rng.random() < 0.3,
                slack=rng.choice([0, 0, 1]),
            )
        )  # fmt: skip
    spread = [
        choice._replace(
            devices=tuple(rank + copy * used for copy in range(copies) for rank in choice.devices)
        )
        for choice in choices
    ]
    cluster = Cluster(
        devices=tuple(Device(kind="cpu", memory_bytes=2**40) for _ in range(used * copies))
    )
    try:
        plan = assemble(graph, None, cluster, spread, batch_size=12, copies=copies)
        validate(plan, graph)
    except PlanError:
        return None
    return plan


@lru_cache
def _wanted(name: str) -> tuple[History, dict[str, torch.Tensor]]:
    return single_process(example(name, torch.float64)[0], sgd, STEPS)


def _check(name: str, seed: int) -> int:
    """Stages of the plan that was drawn and run; 0 where the draw was no plan."""
    made, graph = example(name, torch.float64)
    plan = random_plan(graph, seed)
    if plan is None:
        return 0
    got = pipeline_run(made, graph, plan, sgd, STEPS, transport="in_process")
    assert_same(got, _wanted(name), 1e-10)
    return len(plan.stages)


@pytest.mark.parametrize("name", MODELS)
def test_random_plans_equal_a_single_process(name: str) -> None:
    sizes = [_check(name, seed) for seed in range(12)]
    # The draw must not be idle: most are plans, and of several stages.
    assert sum(1 for size in sizes if size > 1) >= 4


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_many_random_plans_equal_a_single_process(name: str) -> None:
    sizes = [_check(name, seed) for seed in range(1000, 1300)]
    assert sum(1 for size in sizes if size > 1) >= 100
