"""Ranks need not load what they do not read."""

from __future__ import annotations

import pytest
import torch

from graphpipe.errors import InputError
from graphpipe.runtime.inputs import keep_local, local_batches
from graphpipe.runtime.launch import launch
from graphpipe.runtime.pipeline import Pipeline
from tests.runtime.equality import example, sgd
from tests.runtime.manual import Part, manual_plan

PARTS = [
    Part("p", 3), Part("q", 3), Part("r1", 3), Part("r2", 3), Part("r3", 3), Part("cat join", 3)
]  # fmt: skip


def test_each_rank_gets_only_the_inputs_of_its_stages() -> None:
    made, graph = example("unequal")
    plan = manual_plan(graph, PARTS, batch_size=12)
    whole = (made.args, made.kwargs, made.targets)

    def run() -> tuple[set[str], float]:
        pipe = Pipeline(made.model, plan, made.loss_fn, sgd, graph=graph, timeout=60)
        unread = pipe.unread_inputs
        (batch,) = local_batches([whole], unread, lambda item: item)
        args, kwargs, targets = batch
        loss = pipe.step(args, kwargs, targets=targets, batch_size=12)
        with pytest.raises(InputError):
            pipe.step(*keep_local(whole, {"args[0]", "kwargs['y']", "kwargs['z']", "targets"})[:2])
        pipe.close()
        return unread, float(loss)

    results = launch(run, plan.world_size, timeout=60, threads=1, method="fork")
    everything = {"args[0]", "kwargs['y']", "kwargs['z']", "targets"}
    reads = [everything - unread for unread, _ in results]
    assert reads == [{"args[0]"}, {"kwargs['y']"}, {"kwargs['z']"}, set(), set(), {"targets"}]
    other = made.loss_fn(made.model(*made.args, **made.kwargs), made.targets)
    (loss,) = {loss for _, loss in results}
    assert loss == pytest.approx(float(other.detach()), rel=1e-6)


def test_an_input_that_is_read_may_not_be_absent() -> None:
    made, graph = example("unequal")
    plan = manual_plan(graph, PARTS, batch_size=12)
    pipe = Pipeline(made.model, plan, made.loss_fn, sgd, graph=graph, transport="in_process")
    assert pipe.unread_inputs == set()
    with pytest.raises(InputError):
        pipe.step((None,), made.kwargs, targets=made.targets)
    with pytest.raises(InputError, match="keyword"):
        pipe.step(made.args, {"y": made.kwargs["y"]}, targets=made.targets)
    with pytest.raises(InputError, match="number of samples"):
        pipe.step((torch.zeros(11, 4),), made.kwargs, targets=made.targets)
