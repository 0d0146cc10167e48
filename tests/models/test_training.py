"""Real models, as their authors wrote them: captured, planned for 8 devices, trained on workers.

The models of the transformers library have random weights. Three optimizer steps over gloo
equal those of a single process.
"""

from __future__ import annotations

import copy

import pytest

from graphpipe.graph.signature import bind_inputs
from graphpipe.plan.validate import problems_of
from tests.graph.eager import assert_equals_eager, assert_rows_are_independent
from tests.models.running import (
    BATCH,
    Subject,
    alone,
    assert_same,
    on_workers,
    planned,
    subject,
)

WORKERS = {
    "clip": 4, "siglip": 2, "blip2": 3, "llava": 4, "whisper": 2, "t5": 3, "bart": 4, "gpt2": 3,
    "llama": 2, "lora": 3, "mixtral": 4, "bert": 2, "vit": 3, "wav2vec2": 2,
    "zoo:resnet-tiny": 3, "zoo:inception-tiny": 4, "zoo:unet-tiny": 2, "zoo:dlrm-tiny": 4,
    "zoo:mmt-tiny": 4, "zoo:candle-uno-tiny": 4,
}  # fmt: skip
"""How many workers train each model."""
DEFAULT = ("gpt2", "zoo:candle-uno-tiny")
"""Run by default; the others are long."""
BATCH_NORM = ("zoo:resnet-tiny", "zoo:inception-tiny")
CONTRASTIVE = ("clip", "siglip")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in DEFAULT else pytest.mark.long) for name in WORKERS
    ],
)
def of(request: pytest.FixtureRequest) -> tuple[str, Subject]:
    """One model after the other: all tests of a model share its capture."""
    return request.param, subject(request.param)


def test_capture_equals_eager_and_couples_only_what_does(of: tuple[str, Subject]) -> None:
    name, model = of
    job, graph = model.job, model.graph
    # Gradients of randomly initialised models reach 1e17 in places (BLIP-2): compare values.
    assert_equals_eager(
        graph, model.model, job.args, job.kwargs, job.targets, job.loss_fn, atol=1e-5
    )
    assert any(op.coupled for op in graph.ops) == (name in (*CONTRASTIVE, *BATCH_NORM))
    assert {term.reduction for term in graph.loss_terms} <= {
        "coupled" if name in CONTRASTIVE else "sum_count",
        "mean" if name.startswith("zoo:") else "sum_count",
    }
    assert graph.program is not None
    tensors, batch = bind_inputs(graph, graph.program, job.args, job.kwargs, job.targets)
    before = copy.deepcopy(model.model.state_dict())  # statistics of single samples are no good
    assert assert_rows_are_independent(graph, tensors, batch) > 5
    model.model.load_state_dict(before)


def test_plan_for_eight_devices_is_valid(of: tuple[str, Subject]) -> None:
    _, model = of
    plan = planned(model.graph, 8, batch_size=64, budget=200)
    assert list(problems_of(plan, model.graph)) == []
    assert plan.prediction is not None
    assert plan.prediction.iteration_ns > 0


def test_trains_on_workers_as_in_one_process(of: tuple[str, Subject]) -> None:
    name, model = of
    workers = WORKERS[name]
    plan = planned(
        model.graph, workers, stages=workers, replicas=False, copies=1, micro_batches=[2, 4]
    )
    assert plan.world_size == workers
    assert len(plan.stages) >= workers
    start = {key: value.clone() for key, value in model.model.state_dict().items()}
    reference = BATCH
    if name in BATCH_NORM:
        # Its statistics are those of a micro-batch: a loop over the same ones is the reference.
        (reference,) = {stage.micro_batch for stage in plan.stages}
        assert reference < BATCH
    assert_same(on_workers(model, plan), alone(model, reference), start)
