"""Training that stops and goes on is the training that did not stop."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from graphpipe.errors import CheckpointError, RuntimeSetupError, StageFailedError
from graphpipe.graph.capture import capture
from graphpipe.runtime.checkpoint.folder import INDEX, complete_checkpoints
from graphpipe.runtime.checkpoint.plain import load_state_dict
from graphpipe.runtime.launch import launch
from graphpipe.runtime.optimize import LossScale
from graphpipe.runtime.pipeline import Pipeline
from tests.runtime.checkpoint.runs import assert_close, assert_equal, dropping, run
from tests.runtime.equality import adamw, example, halves, sgd
from tests.runtime.manual import Part, manual_plan
from tests.runtime.models import cross_entropy

DIAMOND = [Part("stem", 2), Part("a", 2), Part("b", 2), Part("cat", 2)]
FEWER = [Part("stem", 4, (0,)), Part("a", 4, (1,)), Part("b", 4, (0,)), Part("cat", 4, (1,))]
WIDER = [Part("stem", 2, replicas=2), Part("a b", 2), Part("cat", 4, replicas=3)]


def by_group(named: Any) -> torch.optim.Optimizer:
    """Two groups, of which a rank may lack one."""
    named = list(named)
    heavy = [p for name, p in named if name.endswith("weight")]
    light = [p for name, p in named if not name.endswith("weight")]
    groups = [{"params": heavy, "weight_decay": 0.1}, {"params": light, "lr": 0.02}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.01)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], gamma=0.5),
        ],
        milestones=[3],
    )


@pytest.mark.parametrize("background", [False, True])
def test_the_same_plan_goes_on_bit_by_bit(tmp_path: Path, background: bool) -> None:
    made, graph = dropping()
    plan = manual_plan(graph, DIAMOND, batch_size=12)
    options: dict[str, Any] = {"schedule": halving, "transport": "in_process", "seed": 5}
    whole = run(made, graph, plan, by_group, range(6), **options)
    first = run(
        made, graph, plan, by_group, range(3), save=tmp_path, background=background, **options
    )
    options["seed"] = 0  # that of the checkpoint counts
    second = run(made, graph, plan, by_group, range(3, 6), load=tmp_path, **options)
    assert_equal((first[0] + second[0], second[1]), whole)


@pytest.mark.parametrize(
    ("parts", "copies"), [(FEWER, 1), (WIDER, 1), (FEWER, 2)], ids=["fewer", "wider", "copies"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_plan_goes_on(
    tmp_path: Path, parts: list[Part], copies: int, dtype: torch.dtype
) -> None:
    made, graph = example("diamond", dtype)
    optimizer, tolerance = (sgd, 1e-6) if dtype is torch.float32 else (adamw, 1e-10)
    plan = manual_plan(graph, DIAMOND, batch_size=12)
    other = manual_plan(graph, parts, batch_size=12, copies=copies)
    options: dict[str, Any] = {"schedule": halving, "transport": "in_process"}
    whole = run(made, graph, plan, optimizer, range(6), **options)
    first = run(made, graph, plan, optimizer, range(3), save=tmp_path / "1", **options)
    second = run(
        made, graph, other, optimizer, range(3, 5), load=tmp_path / "1", save=tmp_path / "2",
        **options,
    )  # fmt: skip
    third = run(made, graph, plan, optimizer, range(5, 6), load=tmp_path / "2", **options)
    assert_close((first[0] + second[0] + third[0], third[1]), whole, tolerance)


def test_tied_weights_and_plain_pytorch(tmp_path: Path) -> None:
    made, graph = example("tied")
    parts = [Part("embedding", 2), Part("middle", 2), Part("head", 2)]
    plan = manual_plan(graph, parts, batch_size=12)
    _, state = run(made, graph, plan, adamw, range(2), save=tmp_path, transport="in_process")
    loaded = load_state_dict(tmp_path)
    assert sorted(loaded) == sorted(made.model.state_dict())
    fresh = copy.deepcopy(made.model)
    fresh.load_state_dict(loaded)
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, state[name])


def _over_gloo(root: str, which: str) -> Any:
    made, graph = dropping()
    plan = manual_plan(graph, DIAMOND if which != "other" else FEWER, batch_size=12)
    steps = {"whole": range(6), "first": range(3)}.get(which, range(3, 6))
    return run(
        made, graph, plan, sgd, steps, schedule=halving, timeout=60,
        load=Path(root) if which in ("second", "other") else None,
        save=Path(root) if which == "first" else None,
        background=which == "first",
    )  # fmt: skip


def test_processes_and_one_process_read_each_other(tmp_path: Path) -> None:
    root = str(tmp_path)
    whole = launch(_over_gloo, 4, (root, "whole"), timeout=60, threads=1)
    first = launch(_over_gloo, 4, (root, "first"), timeout=60, threads=1)
    second = launch(_over_gloo, 4, (root, "second"), timeout=60, threads=1)
    for a, b, c in zip(first, second, whole, strict=True):
        assert_equal((a[0] + b[0], b[1]), c)
    assert len(list(complete_checkpoints(tmp_path)[0].glob("*.safetensors"))) == 8
    # The same checkpoint in a single process, under the same plan: only sums differ.
    made, graph = dropping()
    plan = manual_plan(graph, DIAMOND, batch_size=12)
    got = run(
        made, graph, plan, sgd, range(3, 6), schedule=halving, load=tmp_path,
        transport="in_process",
    )  # fmt: skip
    assert_close(got, second[0], 1e-6)


def test_loss_scale_and_frozen_parameters(tmp_path: Path) -> None:
    made, graph = example("frozen")
    parts = [Part("frozen", 2), Part("trained", 2), Part("cat head", 2)]
    plan = manual_plan(graph, parts, batch_size=12)

    def pipeline() -> Pipeline:
        scale = LossScale(initial=8.0, growth_interval=2)
        return Pipeline(
            made.model, plan, made.loss_fn, sgd, graph=graph, transport="in_process",
            loss_scale=scale,
        )  # fmt: skip

    pipe = pipeline()
    for _ in range(3):
        pipe.step(made.args, targets=made.targets)
    pipe.save(tmp_path)
    other = pipeline()
    assert other.load(tmp_path) is None
    saved, got = pipe.workers[0].scale, other.workers[0].scale
    assert saved is not None
    assert got is not None
    assert got.state_dict() == saved.state_dict() == {"scale": 16.0, "good_steps": 1}
    for name, value in pipe.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
    plain = Pipeline(made.model, plan, made.loss_fn, sgd, graph=graph, transport="in_process")
    with pytest.raises(CheckpointError, match="Loss scaling is on in one"):
        plain.load(tmp_path)
    plain.load(tmp_path, model_only=True)
    assert plain.iterations == 0


def _pipe(name: str = "diamond", optimizer: Any = sgd, **options: Any) -> Pipeline:
    made, graph = example(name)
    parts = DIAMOND if name == "diamond" else [Part("a", 2), Part("b c d", 2)]
    plan = manual_plan(graph, parts, batch_size=12)
    return Pipeline(
        made.model, plan, made.loss_fn, optimizer, graph=graph, transport="in_process", **options
    )


def test_refusals_name_what_differs_and_change_nothing(tmp_path: Path) -> None:
    pipe = _pipe()
    made, _ = example("diamond")
    pipe.step(made.args, targets=made.targets)
    pipe.save(tmp_path)
    other = _pipe("chain")
    before = other.state_dict()
    with pytest.raises(CheckpointError) as caught:
        other.load(tmp_path)
    text = str(caught.value)
    assert "not in the checkpoint: a.weight, a.bias" not in text  # both have a
    assert "not in the checkpoint: c.weight, c.bias, d.weight and 1 more" in text
    assert "not in the model: head.bias, head.weight, stem.bias and 1 more" in text
    assert "a.weight is float32 [8, 8] in the checkpoint and float32 [8, 6] in the model" in text
    for name, value in other.state_dict().items():
        assert torch.equal(value, before[name])
    with pytest.raises(CheckpointError, match=r"another optimizer.*Expected AdamW, got SGD"):
        _pipe(optimizer=adamw).load(tmp_path)
    fresh = _pipe()
    with pytest.raises(CheckpointError, match="another number of learning rate schedulers"):
        fresh.load(tmp_path, schedulers=[halving(item) for item in fresh.optimizers])
    scheduled = _pipe()
    steps = [torch.optim.lr_scheduler.StepLR(item, 2) for item in scheduled.optimizers]
    scheduled.save(tmp_path / "scheduled", schedulers=steps)
    fresh = _pipe()
    with pytest.raises(CheckpointError, match=r"other kinds. Expected StepLR, got SequentialLR"):
        fresh.load(tmp_path / "scheduled", schedulers=[halving(o) for o in fresh.optimizers])
    with pytest.raises(CheckpointError, match=r"no complete checkpoint.*no such folder"):
        fresh.load(tmp_path / "elsewhere")

    def some(named: Any) -> torch.optim.Optimizer:
        groups = [{"params": [p], "lr": 0.1 + i} for i, (_, p) in enumerate(named)]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    apart = _pipe(optimizer=some)
    apart.save(tmp_path / "apart")
    with pytest.raises(CheckpointError, match="saved with different options"):
        _pipe().load(tmp_path / "apart")


class Cached(nn.Module):
    """Scales by a buffer that is not part of its state."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("cache", torch.arange(float(length)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu()) * self.cache.mean()


def test_a_buffer_of_another_shape_is_never_filled_in_part(tmp_path: Path) -> None:
    pipes = []
    for length in (4, 8):
        torch.manual_seed(0)
        model, x, targets = Cached(length), torch.randn(12, 6), torch.randint(0, 3, (12,))
        graph = capture(model, (x,), targets=targets, loss_fn=cross_entropy)
        plan = manual_plan(graph, [Part("a", 4), Part("b", 4)], batch_size=12)
        pipes.append(Pipeline(model, plan, cross_entropy, sgd, graph=graph, transport="in_process"))
    pipes[0].step(x, targets=targets)
    pipes[0].save(tmp_path)
    with pytest.raises(CheckpointError, match=r"cache is float32 \[4\] in the checkpoint and"):
        pipes[1].load(tmp_path)
    assert pipes[1].iterations == 0
    pipes[1].load(tmp_path, model_only=True)
    (cache,) = (w.state["cache"] for w in pipes[1].workers if "cache" in w.state)
    assert torch.equal(cache, torch.arange(8.0))
    want = pipes[0].state_dict()
    assert all(torch.equal(v, want[name]) for name, v in pipes[1].state_dict().items())


def test_what_a_failed_step_left_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = _pipe()
    made, _ = example("diamond")

    def fails() -> None:
        raise ValueError("no memory")

    monkeypatch.setattr(pipe.optimizers[-1], "step", fails)
    with pytest.raises(StageFailedError, match="no memory"):
        pipe.step(made.args, targets=made.targets)
    with pytest.raises(RuntimeSetupError, match="failed in an earlier call"):
        pipe.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    pipe = _pipe()
    made, _ = example("diamond")
    for background in (False, True):
        with pytest.raises(CheckpointError, match=r"plain data only \(at data.f\).*a function"):
            pipe.save(tmp_path, data={"f": halves}, background=background).wait()
        pipe._checkpoints._pending = None  # its error has been seen
    pipe.accumulate(made.args, targets=made.targets)
    with pytest.raises(CheckpointError, match="after update"):
        pipe.save(tmp_path)
    pipe.update()
    with pytest.raises(CheckpointError, match="keep=0"):
        pipe.save(tmp_path, keep=0)
    assert not list(tmp_path.iterdir())


def test_the_index_has_the_names_of_the_state_dict_and_no_pickle(tmp_path: Path) -> None:
    made, graph = dropping()
    plan = manual_plan(graph, DIAMOND, batch_size=12)
    run(made, graph, plan, adamw, range(1), save=tmp_path, transport="in_process")
    folder = complete_checkpoints(tmp_path)[0]
    index = json.loads((folder / INDEX).read_text())
    names = {item["name"] for item in index["tensors"] if item["section"] == "model"}
    assert names == set(made.model.state_dict())
    kinds = {item["key"] for item in index["tensors"] if item["section"] == "optimizer"}
    assert kinds == {"step", "exp_avg", "exp_avg_sq"}
    assert {path.name for path in folder.iterdir()} == {
        "index.json", "COMPLETE", "model-00000.safetensors", "training-00000.safetensors",
    }  # fmt: skip


def _failing(root: str) -> str:
    made, graph = example("diamond")
    plan = manual_plan(graph, DIAMOND, batch_size=12)
    pipe = Pipeline(made.model, plan, made.loss_fn, sgd, graph=graph, timeout=30)
    pipe.step(made.args, targets=made.targets)
    try:
        pipe.save(root + "/file/x")
    except CheckpointError as error:
        first = str(error)
    if dist.get_rank() == 2:
        pipe.workers[0].optimizer.state[next(iter(pipe.workers[0].parameters.values()))]["f"] = run
    try:
        pipe.save(root)
    except CheckpointError as error:
        return first + " // " + str(error)
    return "saved"


def test_a_failure_of_one_rank_is_told_alike_by_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    texts = launch(_failing, 4, (str(tmp_path),), timeout=30, threads=1)
    assert len(set(texts)) == 1
    assert "Cannot save the checkpoint: NotADirectoryError" in texts[0]
    assert "(at optimizer state of b." in texts[0]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
