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


class Echo(nn.Module):
    """Hands back its inputs beside what it computes; nothing reads the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, tag: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.second(self.first(x).tanh()), x, tag


def _first_loss(output: tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output[0], labels)


def test_an_input_that_is_handed_back_has_values_on_every_rank() -> None:
    torch.manual_seed(0)
    x, tag, labels = torch.randn(12, 4), torch.arange(12.0), torch.randint(0, 3, (12,))
    model = Echo()
    graph = capture(model, (x, tag), targets=labels, loss_fn=_first_loss)
    plan = manual_plan(graph, [Part("first", 2), Part("second", 4)], batch_size=12)

    def run() -> tuple[set[str], tuple[torch.Tensor, ...]]:
        pipe = Pipeline(model, plan, _first_loss, sgd, graph=graph, timeout=60)
        unread = pipe.unread_inputs
        args, kwargs, targets = keep_local(((x, tag), {}, labels), unread)
        pipe.step(args, kwargs, targets=targets)
        output = pipe.predict(args, kwargs)
        pipe.close()
        return unread, output

    results = launch(run, 2, timeout=60, threads=1, method="fork")
    assert [unread for unread, _ in results] == [{"targets"}, {"args[0]"}]
    for _, (_, echoed, label) in results:
        assert torch.equal(echoed, x)
        assert torch.equal(label, tag)
    assert torch.equal(results[0][1][0], results[1][1][0])


class Views(nn.Module):
    """Three views of every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.view, self.head = nn.Linear(4, 5), nn.Linear(15, 3)

    def forward(self, views: torch.Tensor) -> torch.Tensor:
        return self.head(self.view(views).tanh().reshape(-1, 15))


def test_a_variant_of_one_sample_with_several_rows() -> None:
    torch.manual_seed(0)
    model = Views()
    views, labels = torch.randn(36, 4), torch.randint(0, 3, (12,))
    options = {"rows_per_sample": {"views": 3}}
    graph = capture(model, (views,), targets=labels, loss_fn=cross_entropy, **options)
    plan = manual_plan(graph, [Part("view", 2), Part("head", 4)], batch_size=12)
    pipe = Pipeline(
        model, plan, cross_entropy, sgd, graph=graph, transport="in_process",
        variants="capture", capture_options=options,
    )  # fmt: skip
    # The first evaluation sees one sample, and its variant serves any number.
    for samples in (1, 2, 5):
        got = pipe.predict((views[: 3 * samples],))
        torch.testing.assert_close(got, model(views[: 3 * samples]))
        loss = pipe.eval_step((views[: 3 * samples],), targets=labels[:samples])
        other = cross_entropy(model(views[: 3 * samples]), labels[:samples])
        assert float(loss) == pytest.approx(float(other.detach()), rel=1e-6)
