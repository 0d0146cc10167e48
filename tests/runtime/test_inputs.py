"""Ranks need not load what they do not read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphpipe.errors import InputError
from graphpipe.graph.capture import capture
from graphpipe.runtime.inputs import keep_local, local_batches
from graphpipe.runtime.launch import launch
from graphpipe.runtime.pipeline import Pipeline
from tests.runtime.equality import example, sgd
from tests.runtime.manual import Part, manual_plan
from tests.runtime.models import cross_entropy

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
        loss = pipe.step(args, kwargs, targets=targets)
        pipe.eval_step(args, kwargs, targets=targets)
        assert pipe.predict(args, kwargs).shape[0] == 12
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
    args, kwargs, _ = keep_local((made.args, made.kwargs, made.targets), {"args[0]"})
    with pytest.raises(InputError, match="has no values"):
        pipe.step(args, kwargs, targets=made.targets)
    with pytest.raises(InputError):
        pipe.step((None,), made.kwargs, targets=made.targets)
    with pytest.raises(InputError, match="keyword"):
        pipe.step(made.args, {"y": made.kwargs["y"]}, targets=made.targets)
    with pytest.raises(InputError, match="number of samples"):
        pipe.step((torch.zeros(11, 4),), made.kwargs, targets=made.targets)


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.image, self.head = nn.Linear(4, 5), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, text: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        h = self.text(text).tanh()
        if image is not None:
            h = h + self.image(image).tanh()
        return self.head(h)


def test_a_missing_modality_is_missing_on_ranks_that_do_not_read_it() -> None:
    text, image, labels = torch.randn(6, 4), torch.randn(6, 6), torch.randint(0, 3, (6,))
    model = Optional()
    graph = capture(model, (text,), {"image": image}, targets=labels, loss_fn=cross_entropy)
    plan = manual_plan(graph, [Part("image", 2), Part("text add head", 6)], batch_size=6)

    def run() -> list[float]:
        pipe = Pipeline(model, plan, cross_entropy, None, graph=graph, timeout=60,
                        variants="capture")  # fmt: skip
        losses: list[float] = []
        for given in (image, None):
            batch = keep_local(((text,), {"image": given}, labels), pipe.unread_inputs)
            losses.append(float(pipe.step(*batch[:2], targets=batch[2])))
        pipe.close()
        return losses

    first, second = launch(run, plan.world_size, timeout=60, threads=1, method="fork")
    assert first == second
    for given, loss in zip((image, None), first, strict=True):
        other = cross_entropy(model(text, given), labels)
        assert loss == pytest.approx(float(other.detach()), rel=1e-6)
