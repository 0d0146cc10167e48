"""Stage modules built by hand from a program."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from graphpipe.errors import RuntimeSetupError
from graphpipe.graph.program import OutputStructure, Program
from graphpipe.runtime.randomness import begin_task
from graphpipe.runtime.stage_module import build_stage_module, state_names


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)


def _program(model: _Model) -> Program:
    """``second(dropout(first(x)) * mask) + arange(b)`` as capture writes programs."""
    graph = fx.Graph()
    size = graph.placeholder("micro_batch_size")
    x = graph.placeholder("x")
    aten = torch.ops.aten
    weights = {
        name: graph.get_attr(name) for name in ("first.weight", "first.bias", "second.weight")
    }
    one = graph.call_function(
        aten.linear.default, (x, weights["first.weight"], weights["first.bias"])
    )
    one.name = "one"
    drop = graph.call_function(aten.dropout.default, (one, 0.5, True))
    drop.name = "drop"
    double = graph.call_function(operator.mul, (size, 1))
    double.name = "double"
    rows = graph.call_function(
        aten.arange.default, (double,), {"device": torch.device("meta"), "dtype": torch.float32}
    )
    rows.name = "rows"
    two = graph.call_function(aten.linear.default, (drop, weights["second.weight"]))
    two.name = "two"
    column = graph.call_function(aten.unsqueeze.default, (rows, 1))
    column.name = "column"
    out = graph.call_function(aten.add.Tensor, (two, column))
    out.name = "out"
    graph.output((out,))
    module = fx.GraphModule(model, graph)
    state = dict(model.named_parameters())
    spec = pytree.tree_structure(((0,), {}, None))
    return Program(module, spec, OutputStructure(spec, ()), {}, state)


def _stage(program: Program, model: _Model, **kwargs: object) -> fx.GraphModule:
    state = dict(model.named_parameters())
    options = {"prep": ["rows", "column"], "state": state, **kwargs}
    return build_stage_module(program, **options)  # type: ignore[arg-type]


def test_two_stages_compute_what_the_whole_does() -> None:
    model = _Model()
    program = _program(model)
    first = _stage(program, model, ops=["one"], inputs=["x"], outputs=["one"])
    second = _stage(program, model, ops=["drop", "two", "out"], inputs=["one"], outputs=["out"])
    x = torch.randn(5, 3)
    torch.manual_seed(0)
    (middle,) = first(5, x)
    (got,) = second(5, middle)
    torch.manual_seed(0)
    hidden = torch.dropout(model.first(x), 0.5, True)
    want = hidden @ model.second.weight.T + torch.arange(5.0).unsqueeze(1)
    torch.testing.assert_close(got, want)


def test_a_stage_holds_its_own_parameters_under_the_model_s_names() -> None:
    model = _Model()
    program = _program(model)
    first = _stage(program, model, ops=["one"], inputs=["x"], outputs=["one"])
    assert dict(first.named_parameters()).keys() == {"first.weight", "first.bias"}
    assert first.get_parameter("first.weight") is model.first.weight
    assert state_names(program, ["two"], []) == ("second.weight",)


def test_random_ops_are_seeded_by_key_and_first_sample() -> None:
    model = _Model()
    program = _program(model)
    stage = _stage(
        program, model, ops=["drop"], inputs=["one"], outputs=["drop"], random_keys={"drop": "d/0"}
    )
    other = _stage(
        program, model, ops=["drop"], inputs=["one"], outputs=["drop"], random_keys={"drop": "d/1"}
    )
    x = torch.ones(64, 4)

    def run(module: fx.GraphModule, step: int, first: int) -> torch.Tensor:
        begin_task(3, step, first, torch.default_generator)
        torch.rand(7)  # other random numbers in between must not matter
        out: torch.Tensor = module(64, x)[0]
        return out

    assert torch.equal(run(stage, 1, 0), run(stage, 1, 0))
    for module, step, first in ((stage, 2, 0), (stage, 1, 64), (other, 1, 0)):
        assert not torch.equal(run(stage, 1, 0), run(module, step, first))


def test_creation_ops_follow_the_stage_s_device() -> None:
    model = _Model()
    stage = _stage(
        _program(model), model, ops=["out"], inputs=["two"], outputs=["out"], device="cpu"
    )
    assert stage(3, torch.zeros(3, 2))[0].device.type == "cpu"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ops": ["nowhere"]}, "does not have: nowhere"),
        ({"ops": ["two"], "inputs": []}, "'drop', which no stage sends"),
        ({"ops": ["one"], "inputs": ["x"], "state": {}}, "No value is known for 'first.weight'"),
    ],
)
def test_what_a_stage_cannot_have_is_named(change: dict[str, object], text: str) -> None:
    model = _Model()
    with pytest.raises(RuntimeSetupError, match=text):
        _stage(_program(model), model, **{"inputs": ["x"], "outputs": [], **change})
