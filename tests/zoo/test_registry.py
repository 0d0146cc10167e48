"""Every model of the zoo: full size on the meta device, small size with values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphpipe.zoo.job import Batch, Job
from graphpipe.zoo.registry import ZOO

SMALL = sorted(name for name in ZOO if name.endswith("-tiny") or name == "digits")
PARAMETERS = {
    "candle-uno": 820_948_704,
    "dlrm": 1_684_938_753,
    "gpt2": 124_439_808,  # as published for GPT-2 small
    "resnet": 25_557_032,  # as published for ResNet-50
}


def loss_of(job: Job, model: torch.nn.Module, batch: Job | Batch) -> torch.Tensor:
    output: Any = model(*batch.args, **batch.kwargs)
    assert job.loss_fn is not None
    return job.loss_fn(output) if batch.targets is None else job.loss_fn(output, batch.targets)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_builds_on_the_meta_device(name: str) -> None:
    job = ZOO[name].make().on_meta()
    model = job.build_model()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    loss = loss_of(job, model, job)
    assert loss.is_meta
    assert loss.ndim == 0
    assert job.name == name
    if name in PARAMETERS:
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_learns(name: str) -> None:
    torch.manual_seed(0)
    job = ZOO[name].make()
    model = job.build_model()
    assert job.data is not None
    loss = loss_of(job, model, next(iter(job.data(6, 0))))
    loss.backward()
    assert torch.isfinite(loss)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    without = [n for n, p in trained if p.grad is None or not p.grad.any()]
    # A key's bias adds the same to all scores of a query, which the softmax takes away.
    assert [n for n in without if not n.endswith("key.bias")] == []


def test_frozen_tower_and_nothing_else() -> None:
    model = ZOO["llava-tiny"].make().build_model()
    frozen = {n.split(".")[0] for n, p in model.named_parameters() if not p.requires_grad}
    trained = {n.split(".")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert frozen == {"patches", "tower"}
    assert trained == {"projector", "embedding", "layers", "norm", "head"}


@pytest.mark.parametrize("name", SMALL)
def test_data_is_the_same_in_every_process_and_new_in_every_epoch(name: str) -> None:
    first, again, other = (next(iter(make().data(4, e))) for make, e in _epochs(name))
    assert all(torch.equal(a, b) for a, b in zip(first.args, again.args, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.args, other.args, strict=True))


def _epochs(name: str) -> list[tuple[Any, int]]:
    make = ZOO[name].make
    return [(make, 0), (make, 0), (make, 1)]


def test_candle_uno_doses_go_straight_to_the_join() -> None:
    torch.manual_seed(0)
    job = ZOO["candle-uno-tiny"].make()
    model = job.build_model()
    with torch.no_grad():
        before = model(*job.args)
        after = model(job.args[0] + 1, *job.args[1:])
    assert not torch.equal(before, after)
    towers = {n.split(".")[1] for n, _ in model.named_parameters() if n.startswith("towers")}
    assert towers == {"2", "3", "4", "5", "6"}


@pytest.mark.parametrize(
    ("name", "parameter", "alias"),
    [
        ("gpt2-tiny", "tokens.embedding.weight", "head.weight"),
        ("t5-tiny", "embedding.weight", "head.weight"),
    ],
)
def test_head_is_tied(name: str, parameter: str, alias: str) -> None:
    model = ZOO[name].make().build_model()
    names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    assert {parameter, alias} <= set(names)
    assert model.get_parameter(parameter) is model.get_parameter(alias)


@pytest.mark.parametrize("name", ["gpt2-tiny", "t5-tiny", "llava-tiny"])
def test_language_models_do_not_see_the_future(name: str) -> None:
    torch.manual_seed(0)
    job = ZOO[name].make()
    model = job.build_model().eval()
    ids = job.args[-1]
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 101
    with torch.no_grad():
        before, after = model(*job.args[:-1], ids), model(*job.args[:-1], changed)
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])
