"""A loss over the whole mini-batch gets a stage of its own; its towers run micro-batches."""

from __future__ import annotations

from graphpipe.cost.published.build import KIND
from graphpipe.cost.table import CostTable, DeviceCosts
from graphpipe.graph.model_graph import LossTerm, ModelGraph, Op, TensorSpec
from graphpipe.plan.validate import validate
from graphpipe.planner.search import plan
from graphpipe.planner.whole import whole_batch_ops
from tests.planner.synthetic import cluster_of

import numpy as np  # isort: skip


def contrastive() -> ModelGraph:
    """Two towers of two ops; similarity and loss mix the batch; a batch norm does too."""
    spec = TensorSpec(shape=("b", 4), dtype="float32", requires_grad=True)

    def op(name: str, *inputs: str, target: str = "aten.x", coupled: bool = False) -> Op:
        return Op(name=name, target=target, key=name, inputs=inputs, output=spec,
                  requires_grad=True, coupled=coupled)  # fmt: skip

    return ModelGraph(
        name="contrastive",
        ops=(
            op("i0"),
            op("norm", "i0", target="aten.batch_norm.default", coupled=True),
            op("t0"),
            op("t1", "t0"),
            op("similarity", "norm", "t1", coupled=True),
            op("loss", "similarity", coupled=True),
        ),
        loss_terms=(LossTerm(op="loss", reduction="coupled"),),
    )


def costs_of(graph: ModelGraph) -> CostTable:
    count = len(graph.ops)
    seconds = np.array([[1e-3], [1e-3], [1e-3], [1e-3], [1e-5], [1e-5]])
    return CostTable(
        fingerprint=graph.fingerprint,
        source="published",
        ops=tuple(op.name for op in graph.ops),
        micro_batches=(1,),
        devices={KIND: DeviceCosts(seconds, 2 * seconds)},
        output_bytes=np.zeros((count, 2)),
        gradient_bytes=np.zeros((count, 2)),
        storages=np.zeros((0, 2)),
        saved=((),) * count,
        workspace_bytes=np.zeros((count, 2)),
    )


def test_what_mixes_the_batch_above_a_coupled_loss() -> None:
    assert whole_batch_ops(contrastive()) == (False, False, False, False, True, True)


def test_towers_run_side_by_side_under_a_whole_loss() -> None:
    graph = contrastive()
    found = plan(graph, costs_of(graph), cluster_of(4), batch_size=32, replicas=False)
    validate(found, graph)
    of = {op: stage for stage in found.stages for op in stage.ops}
    assert of["loss"].micro_batch == 32
    assert of["loss"].replicas == 1
    assert found.copies == 1
    assert of["i0"].micro_batch < 32
    assert set(of["i0"].devices).isdisjoint(of["t0"].devices)


def test_the_loss_may_follow_the_micro_batch_instead() -> None:
    graph = contrastive()
    found = plan(graph, costs_of(graph), cluster_of(4), batch_size=32, coupled="micro_batch")
    assert all(stage.micro_batch < 32 for stage in found.stages)
