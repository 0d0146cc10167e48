"""Initial values from distributed checkpoints of PyTorch and from our own, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from graphpipe.errors import CheckpointError
from graphpipe.graph.capture import capture
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.runtime.state_folder import DistributedState, state_at
from tests.runtime.equality import sgd
from tests.runtime.manual import Part, manual_plan
from tests.runtime.models import Example, build

# dcp.save says that it saves from one process, as it was asked to.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PARTS = [Part("embedding", 2), Part("middle", 4), Part("head", 4)]


def _start(state: Path) -> tuple[Pipeline, Example]:
    """A pipeline of a model on the meta device."""
    made = build("tied")
    made.model.to("meta")
    made.model.head.weight = made.model.embedding.weight  # type: ignore[union-attr]
    graph = capture(made.model, made.args, targets=made.targets, loss_fn=made.loss_fn, name="tied")
    plan = manual_plan(graph, PARTS, batch_size=12)
    pipe = Pipeline(
        made.model, plan, made.loss_fn, sgd, graph=graph, transport="in_process", state=str(state)
    )
    return pipe, made


@pytest.mark.parametrize("prefix", ["", "model", "app.model"])
def test_a_distributed_checkpoint_gives_each_rank_its_own(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = build("tied")
    values = dict(real.model.state_dict())
    content: dict[str, object] = dict(values)
    for part in reversed(prefix.split(".") if prefix else []):
        content = {part: content}
    # What else is in it, an optimizer's state under names that look alike, is not taken.
    content["other"] = {"embedding.weight": torch.zeros(11, 8)}
    dcp.save(content, checkpoint_id=tmp_path, no_dist=True)
    asked: list[str] = []
    plain = DistributedState.tensor

    def spied(source: DistributedState, name: str) -> torch.Tensor:
        asked.append(name)
        return plain(source, name)

    monkeypatch.setattr(DistributedState, "tensor", spied)
    pipe, made = _start(tmp_path)
    assert sorted(asked) == sorted(name for worker in pipe.workers for name in worker.state)
    assert all(parameter.is_meta for parameter in made.model.parameters())
    state = pipe.state_dict()
    assert state.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(state[name], value)
    loss = pipe.step(real.args, targets=real.targets)
    other = real.loss_fn(real.model(*real.args), real.targets)
    assert float(loss) == pytest.approx(float(other.detach()), rel=1e-6)


def test_a_saved_pipeline_gives_the_values_of_another(tmp_path: Path) -> None:
    real = build("tied")
    graph = capture(real.model, real.args, targets=real.targets, loss_fn=real.loss_fn, name="tied")
    plan = manual_plan(graph, [Part("embedding middle head", 4)], batch_size=12)
    first = Pipeline(real.model, plan, real.loss_fn, sgd, graph=graph, transport="in_process")
    first.step(real.args, targets=real.targets)
    first.save(tmp_path).wait()
    pipe, _ = _start(tmp_path)
    want = first.state_dict()
    for name, value in pipe.state_dict().items():
        assert torch.equal(value, want[name])


def test_a_damaged_distributed_checkpoint_is_named(tmp_path: Path) -> None:
    values = build("tied").model.state_dict()
    dcp.save(values, checkpoint_id=tmp_path, no_dist=True)
    for file in tmp_path.glob("*.distcp"):
        file.unlink()
    with pytest.raises(CheckpointError, match="Cannot read a tensor"):
        _start(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"index of the distributed checkpoint.*metadata"):
        state_at(tmp_path, None, {})  # type: ignore[arg-type]
