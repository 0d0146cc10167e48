"""The search among shared devices: what it finds is better, valid, and trains right."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

from graphpipe.cost.analytic import estimate
from graphpipe.cost.cluster import Cluster
from graphpipe.cost.table import CostTable
from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.validate import problems_of
from graphpipe.planner.colocate import LAYOUTS, Shape
from graphpipe.planner.search import make_space, plan
from graphpipe.planner.seeds import Freedom
from graphpipe.planner.shared_search import SharedSearch, applies, assembled, better, grounds
from graphpipe.planner.space import Space
from graphpipe.runtime.emulate import emulate
from graphpipe.runtime.launch import launch
from graphpipe.simulate.simulator import simulate
from graphpipe.zoo.llava import llava
from tests.planner.synthetic import cluster_of, towers, units_of
from tests.planner.test_colocate import encoder_and_trunk
from tests.runtime.equality import adamw, assert_same, pipeline_run, single_process
from tests.runtime.models import Example


def space_of(branches: int, layers: int, trunk: int, devices: int, batch: int) -> Space:
    file = encoder_and_trunk(layers, trunk) if branches == 1 else towers(branches, layers, trunk)
    units = units_of(file)
    return Space(
        units, cluster_of(devices, bandwidth=1e11), batch, (2.0**40,) * devices, (0,) * len(units)
    )


def test_interleaving_and_colocation_beat_a_chain_where_the_bubble_rules() -> None:
    file = encoder_and_trunk(8, 24)
    cluster = cluster_of(4, bandwidth=1e11)
    options: dict[str, Any] = {"batch_size": 8, "copies": 1, "replicas": (1, 4), "budget": 300}
    plain = plan(file.graph, file.costs, cluster, families=("graph", "chain"), **options)
    shared = plan(file.graph, file.costs, cluster, **options)
    assert plain.prediction is not None
    assert shared.prediction is not None
    assert shared.prediction.iteration_ns < 0.95 * plain.prediction.iteration_ns
    hosted = [rank for stage in shared.stages for rank in stage.devices]
    assert len(hosted) > len(set(hosted))
    assert list(problems_of(shared, file.graph)) == []
    emulated = emulate(shared, clock="virtual", processes=False)
    assert emulated.iteration_ns == simulate(shared, network="channel").iteration_ns


def test_the_same_input_gives_the_same_plan() -> None:
    found = [
        better(space_of(1, 6, 18, 4, 8), Freedom((1, 2), replicas=(1, 2, 4)), None, budget=120)
        for _ in range(2)
    ]
    assert found[0] is not None
    assert found[0] == found[1]


def test_a_plan_that_is_not_beaten_stays() -> None:
    space = space_of(1, 6, 18, 4, 8)
    freedom = Freedom((1, 2), replicas=(1, 2, 4))
    best = better(space, freedom, None, budget=120)
    assert best is not None
    assert better(space, freedom, best, budget=120) is None


def test_it_applies_to_models_with_a_trunk_only() -> None:
    freedom = Freedom((1,))
    assert applies(space_of(1, 4, 8, 4, 8), freedom)
    assert applies(space_of(2, 4, 12, 4, 8), freedom)
    assert not applies(space_of(4, 8, 2, 4, 8), freedom)
    assert not applies(space_of(1, 4, 8, 1, 8), freedom)
    assert not applies(space_of(1, 4, 8, 4, 8), freedom._replace(parts=4))


@pytest.mark.parametrize("fraction", [0.9, 0.6])
def test_memory_is_kept_by_recomputation_or_other_shapes(fraction: float) -> None:
    free = space_of(1, 6, 18, 4, 32)
    freedom = Freedom((1,), replicas=(1, 4))
    wide = better(free, freedom, None, budget=120)
    assert wide is not None
    assert wide.prediction is not None
    room = fraction * max(wide.prediction.peak_memory)
    tight = Space(free.units, free.cluster, 32, (room,) * 4, free.fixed)
    found = better(tight, freedom, None, budget=400)
    if found is not None:
        assert found.prediction is not None
        assert max(found.prediction.peak_memory) <= room
        assert found.prediction.iteration_ns >= wide.prediction.iteration_ns
    assert tight.margin == 0.0


def test_a_search_that_is_stopped_gives_what_it_has() -> None:
    turns = iter(range(10_000))
    search = SharedSearch(
        space_of(1, 6, 18, 4, 8),
        Freedom((1,), replicas=(1, 4)),
        budget=100_000,
        stop=lambda: next(turns) > 3,
    )
    assert search.run() is not None
    assert search.stopped
    assert search.scheduled <= 10


@lru_cache(maxsize=2)
def tiny_llava(frozen: bool) -> tuple[Example, ModelGraph, CostTable]:
    """A small LLaVA with 3 tower and 5 decoder layers, in float64."""
    job = llava(
        image=(8, 4, 16, 2, 3),
        decoder=(31, 16, 2, 24, 5),
        images=2,
        image_tokens=2,
        text=4,
        batch_size=16,
        frozen=frozen,
        name="llava-test",
    )
    model: nn.Module = job.build_model().double()
    images, ids = job.args
    made = Example(copy.deepcopy(model), (images.double(), ids), job.targets, job.loss_fn)
    graph = capture(made.model, made.args, {}, targets=made.targets, loss_fn=made.loss_fn)
    return made, graph, estimate(graph, "cpu-core")


@pytest.mark.parametrize(
    ("layout", "frozen"),
    [
        pytest.param(
            layout,
            frozen,
            marks=() if layout in ("everywhere", "spread") or not frozen else pytest.mark.long,
        )
        for layout in LAYOUTS
        for frozen in (False, True)
    ],
)
def test_plans_of_every_layout_train_as_a_single_process_does(layout: str, frozen: bool) -> None:
    made, graph, costs = tiny_llava(frozen)
    space = make_space(
        graph, costs, Cluster.uniform("cpu-core", nodes=1, per_node=3), batch_size=16, parts=40
    )
    ground = grounds(space)[0]
    assert ground.split.branches
    search = SharedSearch(space, Freedom((1,)))
    shape = Shape(
        layout,
        1,
        3,
        False,
        2,
        2,
        helpers=1,
        branch_batch=2 if layout == "chain" else 4,
        recompute=frozenset({0, 2}),
    )
    judged = search.judge(ground, shape)
    assert judged is not None
    found = assembled(space, judged, (), 0)
    assert found is not None
    assert list(problems_of(found, graph)) == []
    got = pipeline_run(made, graph, found, adamw, 2, transport="in_process")
    assert_same(got, single_process(made, adamw, 2), 1e-10)


@pytest.mark.long
def test_processes_train_as_a_single_process_does_on_shared_devices() -> None:
    made, graph, costs = tiny_llava(False)
    space = make_space(
        graph, costs, Cluster.uniform("cpu-core", nodes=1, per_node=3), batch_size=16, parts=40
    )
    search = SharedSearch(space, Freedom((1,)))
    judged = search.judge(grounds(space)[0], Shape("everywhere", 1, 3, False, 2, 2, branch_batch=4))
    assert judged is not None
    found = assembled(space, judged, (), 0)
    assert found is not None
    results = launch(
        lambda: pipeline_run(made, graph, found, adamw, 2), 3, timeout=120, threads=1, method="fork"
    )
    want = single_process(made, adamw, 2)
    for got in results:
        assert_same(got, want, 1e-10, every_gradient=False)
    assert {name for history, _ in results for name in history[0][1]} == set(want[0][0][1])
    assert torch.isfinite(torch.tensor([loss for loss, _ in want[0]])).all()
