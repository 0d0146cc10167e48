"""Training a job: on workers that it starts, equal to one process, and every wrong request."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from graphpipe.errors import CheckpointError, InputError, RuntimeSetupError
from graphpipe.programs.train import (
    OPTIMIZERS,
    Settings,
    _optimizer,
    prepare,
    save_state,
    train,
)
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.zoo.load import load_job
from tests.cli.helpers import MODEL


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("train") / "branches_to_train.py"
    path.write_text(MODEL)
    return f"{path}:job"


def test_equals_one_process(model: str) -> None:
    settings = Settings(steps=7, optimizer="sgd", learning_rate=0.05, seed=3, trace=True)
    prepared = prepare(model, settings, workers=2)
    heard: list[tuple[int, int]] = []
    outcome = train(prepared, settings, lambda d, t, _: heard.append((d, t)), keep_state=True)
    assert outcome is not None

    job = load_job(model)
    torch.manual_seed(3)
    alone = job.build_model()
    sgd = torch.optim.SGD(alone.parameters(), 0.05)
    losses = []
    assert job.data is not None
    batches = (batch for epoch in range(2) for batch in job.data(8, epoch))
    for batch in islice(batches, 7):
        loss = torch.nn.functional.mse_loss(alone(*batch.args), batch.targets)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        losses.append(float(loss.detach()))

    torch.testing.assert_close(outcome.losses, losses, rtol=0, atol=1e-6)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(outcome.state[name], value, rtol=0, atol=1e-6)
    assert outcome.measured is not None
    assert {e.rank for e in outcome.measured.events} <= {0, 1}
    assert sum(e.kind == "F" for e in outcome.measured.events) == sum(
        len(line.split("F")) - 1 for line in prepared.plan.schedule.lines
    )
    # The listener is called in the worker of rank 0, which is another process.
    assert heard == []


def test_plan_is_for_the_workers_and_the_jobs_batch_size(model: str) -> None:
    prepared = prepare(model, Settings(), workers=3)
    assert (prepared.plan.world_size, prepared.plan.batch_size) == (3, 8)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_optimizers_take_named_parameters(name: str) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = OPTIMIZERS[name]([("weight", weight)], 0.1)
    weight.grad = torch.ones(2)
    optimizer.step()
    assert not torch.equal(weight, torch.ones(2))


def test_saved_state_holds_tied_names(tmp_path: Path) -> None:
    shared = torch.arange(6.0).view(2, 3)
    save_state({"a": shared, "b": shared, "c": shared.T}, tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")
    assert torch.equal(found["a"], shared)
    assert torch.equal(found["b"], shared)
    assert torch.equal(found["c"], shared.T)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize(
    ("factory", "settings", "options", "words"),
    [
        ("job", Settings(optimizer="lion"), {}, "Unknown optimizer"),
        ("without_data", Settings(), {}, "no data to train on"),
        ("job", Settings(), {"plan": Path("p.json"), "batch_size": 4}, "plan and a batch size"),
    ],
)
def test_wrong_request(
    model: str, factory: str, settings: Settings, options: dict[str, object], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        prepare(model.replace(":job", f":{factory}"), settings, **options)  # type: ignore[arg-type]


def test_data_of_another_type_is_refused_with_what_it_should_be(tmp_path: Path) -> None:
    path = tmp_path / "branches_with_tuples.py"
    path.write_text(MODEL + TUPLES)
    settings = Settings(steps=2)
    prepared = prepare(f"{path}:with_tuples", settings, workers=2)
    with pytest.raises(Exception, match=r"type Batch.*graphpipe\.Batch\(args=.*a tuple"):
        train(prepared, settings, lambda *_: None)


def test_workers_that_contradict_the_plan_are_refused(model: str, tmp_path: Path) -> None:
    settings = Settings(steps=1)
    prepare(model, settings, workers=2).plan.save(tmp_path / "two.json")
    with pytest.raises(InputError, match="--workers 2, or none, got --workers 4"):
        prepare(model, settings, plan=tmp_path / "two.json", workers=4)
    again = prepare(model, settings, plan=tmp_path / "two.json", workers=2)
    assert again.plan.world_size == 2


def test_plan_of_another_model_is_refused(model: str, tmp_path: Path) -> None:
    settings = Settings(steps=1)
    prepared = prepare(model, settings, workers=2)
    other = prepared.plan.model_copy(update={"fingerprint": "0" * 16})
    other.save(tmp_path / "other.json")
    wrong = prepare(model, settings, plan=tmp_path / "other.json")
    with pytest.raises(RuntimeSetupError, match="plan"):
        train(wrong, settings, lambda *_: None)


def test_failure_in_a_worker_is_the_one_that_is_raised(tmp_path: Path) -> None:
    path = tmp_path / "failing_branches.py"
    path.write_text(MODEL.replace("range(5)", "range(5 // epoch_zero(epoch))") + FAILS)
    settings = Settings(steps=7)
    prepared = prepare(f"{path}:job", settings, workers=2)
    with pytest.raises(Exception, match="the data ran out"):
        train(prepared, settings, lambda *_: None)


FAILS = """

def epoch_zero(epoch):
    if epoch:
        raise ValueError("the data ran out")
    return 1
"""

TUPLES = """

def with_tuples():
    import dataclasses
    whole = job()
    return dataclasses.replace(
        whole, data=lambda size, epoch: ((b.args, b.targets) for b in whole.data(size, epoch))
    )
"""


def test_a_checkpoint_without_a_position_is_not_resumed(model: str, tmp_path: Path) -> None:
    settings = Settings(steps=2, save=tmp_path, resume=True)
    prepared = prepare(model, settings, workers=2)
    pipe = Pipeline(
        prepared.model, prepared.plan, prepared.job.loss_fn, _optimizer(prepared.job, settings),
        graph=prepared.graph, transport="in_process",
    )  # fmt: skip
    assert prepared.job.data is not None
    batch = next(iter(prepared.job.data(8, 0)))
    pipe.step(batch.args, targets=batch.targets)
    pipe.save(tmp_path)
    with pytest.raises(CheckpointError, match="where in the data training is"):
        train(prepared, settings, lambda *_: None)
