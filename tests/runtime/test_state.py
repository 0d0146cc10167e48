"""Initial values: of a real model, of a file, drawn by name; none of other stages' parameters."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from graphpipe.errors import CheckpointError, RuntimeSetupError
from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.runtime.state import SeededState
from tests.runtime.equality import example, sgd
from tests.runtime.manual import Part, manual_plan
from tests.runtime.models import Example, build


def _on_meta() -> tuple[Example, ModelGraph]:
    made = build("tied")
    made.model.to("meta")
    made.model.head.weight = made.model.embedding.weight  # type: ignore[union-attr]
    graph = capture(made.model, made.args, targets=made.targets, loss_fn=made.loss_fn, name="tied")
    return made, graph


def _plan(graph: ModelGraph, parts: int) -> Plan:
    cuts = [
        [Part("embedding middle head", 4)],
        [Part("embedding", 2), Part("middle", 4), Part("head", 4)],
    ]
    return manual_plan(graph, cuts[parts > 1], batch_size=12)


def test_each_rank_holds_its_own_stages_parameters_only() -> None:
    made, graph = example("diamond")
    parts = [Part("stem", 2), Part("a", 2), Part("b", 2, (0,)), Part("cat", 2)]
    plan = manual_plan(graph, parts, batch_size=12)
    pipe = Pipeline(made.model, plan, made.loss_fn, sgd, graph=graph, transport="in_process")
    assert [set(worker.state) for worker in pipe.workers] == [
        {"stem.weight", "stem.bias", "b.weight", "b.bias"},
        {"a.weight", "a.bias"},
        {"head.weight", "head.bias"},
    ]
    # They are copies: training does not change the model.
    before = copy.deepcopy(made.model.state_dict())
    pipe.step(made.args, targets=made.targets)
    for name, value in made.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_meta_model_takes_its_values_from_a_file(tmp_path: Path) -> None:
    real = build("tied")
    values = {
        name: value.clone()
        for name, value in real.model.state_dict().items()
        if name != "head.weight"
    }
    save_file(values, str(tmp_path / "model.safetensors"))
    made, graph = _on_meta()
    for where in (tmp_path, tmp_path / "model.safetensors"):
        pipe = Pipeline(
            made.model, _plan(graph, 3), made.loss_fn, sgd, graph=graph,
            transport="in_process", state=str(where),
        )  # fmt: skip
        state = pipe.state_dict()
        assert state.keys() == real.model.state_dict().keys()
        for name, value in real.model.state_dict().items():
            assert torch.equal(state[name], value)
        loss = pipe.step(real.args, targets=real.targets)
        other = real.loss_fn(real.model(*real.args), real.targets)
        assert float(loss) == pytest.approx(float(other.detach()), rel=1e-6)


def test_a_bad_state_file_and_missing_values_are_named(tmp_path: Path) -> None:
    made, graph = _on_meta()

    def start(**options: object) -> None:
        Pipeline(
            made.model, _plan(graph, 3), made.loss_fn, sgd, graph=graph,
            transport="in_process", **options,
        )  # type: ignore[arg-type]  # fmt: skip

    with pytest.raises(RuntimeSetupError, match=r"meta device.*embedding.weight"):
        start()
    with pytest.raises(CheckpointError, match="no state file"):
        start(state=str(tmp_path))
    (tmp_path / "x.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="Cannot read"):
        start(state=str(tmp_path))
    save_file({"embedding.weight": torch.zeros(3, 8)}, str(tmp_path / "x.safetensors"))
    with pytest.raises(CheckpointError, match=r"embedding.weight.*\[11, 8\].*\[3, 8\]"):
        start(state=str(tmp_path))


def test_drawn_values_do_not_depend_on_the_plan() -> None:
    made, graph = _on_meta()
    states = []
    for parts, seed in ((1, 5), (3, 5), (3, 6)):
        pipe = Pipeline(
            made.model, _plan(graph, parts), made.loss_fn, sgd, graph=graph,
            transport="in_process", init="seeded", seed=seed,
        )  # fmt: skip
        states.append(pipe.state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])
        assert not torch.equal(value, states[2][name])
    weight = states[0]["middle.weight"]
    assert 0.1 < float(weight.abs().max()) <= 8**-0.5 + 1e-6  # nn.Linear's own rule


class _Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(400, 30))
        self.weight = nn.Parameter(torch.empty(7))
        self.shift = nn.Parameter(torch.empty(7))
        self.norm = nn.BatchNorm1d(7)
        self.register_buffer("table", torch.arange(4.0))


def test_modules_without_reset_parameters_have_a_documented_rule() -> None:
    model = _Odd().to("meta")
    source = SeededState(model, 0)
    assert float(source.tensor("matrix").std()) == pytest.approx(0.02, rel=0.05)
    assert source.tensor("weight").tolist() == [1.0] * 7
    assert source.tensor("shift").tolist() == [0.0] * 7
    assert source.tensor("norm.running_var").tolist() == [1.0] * 7
    with pytest.raises(RuntimeSetupError, match=r"cannot make it.*table"):
        source.tensor("table")
    with pytest.raises(RuntimeSetupError, match="no parameter or buffer 'other'"):
        source.tensor("other")
