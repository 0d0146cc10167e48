"""What one rank refuses, all ranks refuse: at once, in the same words, with nothing sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphpipe.errors import GraphPipeError, InputError
from graphpipe.runtime.launch import launch
from graphpipe.runtime.pipeline import Pipeline
from tests.runtime.equality import example, sgd
from tests.runtime.manual import Part, manual_plan

PARTS = [Part("stem", 2), Part("a", 2), Part("b", 2, (2,)), Part("cat", 2, (0,))]


def _right(pipe: Pipeline, made: Any) -> object:
    return pipe.step(made.args, targets=made.targets)


def _everywhere(wrong: Callable[[Pipeline, Any], object]) -> list[tuple[str, float, float]]:
    """On every rank: the error of a step that rank 1 calls differently, how long it took, and
    the loss of the right step after it."""
    made, graph = example("diamond")
    plan = manual_plan(graph, PARTS, batch_size=12)

    def run() -> tuple[str, float, float]:
        pipe = Pipeline(made.model, plan, made.loss_fn, sgd, graph=graph, timeout=60.0)
        pipe.step(made.args, targets=made.targets)
        start = time.monotonic()
        call = wrong if dist.get_rank() == 1 else _right
        with pytest.raises(GraphPipeError) as caught:
            call(pipe, made)
        seconds = time.monotonic() - start
        assert isinstance(caught.value, InputError)
        loss = float(pipe.step(made.args, targets=made.targets))
        pipe.close()
        return str(caught.value), seconds, loss

    return launch(run, plan.world_size, timeout=60, threads=1, method="fork")


def _step_with(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Pipeline, Any], object]:
    return lambda pipe, made: pipe.step((change(made.args[0]),), targets=made.targets)


@pytest.mark.parametrize(
    ("wrong", "texts"),
    [
        (_step_with(lambda x: x.double()), ("rank 1, args[0]", "float64")),
        (_step_with(lambda x: x[:, 1:]), ("rank 1, args[0]",)),
        (
            lambda pipe, made: pipe.step((made.args[0][:6],), targets=made.targets[:6]),
            ("rank 1", "on 12 samples", "on 6 samples"),
        ),
        (lambda pipe, made: pipe.predict(made.args), ("rank 1", "predict")),
    ],
    ids=["dtype", "shape", "samples", "method"],
)
def test_a_call_that_is_wrong_on_one_rank_is_refused_on_all(
    wrong: Callable[[Pipeline, Any], object], texts: tuple[str, ...]
) -> None:
    results = _everywhere(wrong)
    assert len({text for text, _, _ in results}) == 1
    assert all(seconds < 10.0 for _, seconds, _ in results)
    for text in texts:
        assert text in results[0][0]
    # Nothing was sent and no parameter changed: the next step is that of a run without it.
    made, graph = example("diamond")
    plan = manual_plan(graph, PARTS, batch_size=12)
    pipe = Pipeline(made.model, plan, made.loss_fn, sgd, graph=graph, transport="in_process")
    pipe.step(made.args, targets=made.targets)
    want = float(pipe.step(made.args, targets=made.targets))
    for _, _, loss in results:
        assert loss == pytest.approx(want, rel=1e-6)
