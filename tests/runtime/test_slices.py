"""Slices of parameters: where their values come from, how they become whole."""

from __future__ import annotations

import torch
from safetensors.torch import save_file

from graphpipe.graph.split_joins import split_joins
from graphpipe.runtime.slices import SlicedState, put, take, whole_values
from graphpipe.runtime.state import FileState, ModelState, SeededState
from tests.graph.joined import Joined, captured


def test_values_are_cut_out_of_the_whole(tmp_path: object) -> None:
    model = Joined()
    graph = split_joins(captured(model))
    assert graph.program is not None
    values = whole_values(graph, graph.program.state, model)
    save_file(model.state_dict(), f"{tmp_path}/state.safetensors")
    with torch.device("meta"):
        bare = Joined()
    drawn = SeededState(bare, 3)
    for source, whole in (
        (ModelState(values), model.join.weight),
        (FileState(f"{tmp_path}/state.safetensors", ModelState({})), model.join.weight),
        (drawn, drawn.tensor("join.weight")),
    ):
        cut = SlicedState(source, graph)
        got = cut.tensor("join.weight[:, 4:7]")
        assert torch.equal(got, whole[:, 4:7])
        assert got.is_contiguous()
        assert got.data_ptr() != whole[:, 4:7].data_ptr()
    assert torch.equal(SlicedState(ModelState(values), graph).tensor("head.bias"), model.head.bias)


def test_slices_become_one_tensor_of_the_models_name() -> None:
    model = Joined()
    graph = split_joins(captured(model))
    out: dict[str, torch.Tensor] = {}
    for item in reversed(graph.parameters):
        value = model.join.weight if item.slice else model.get_parameter(item.name)
        put(out, item, (take(value, item.slice) if item.slice else value).detach())
    assert out.keys() == dict(model.named_parameters()).keys()
    assert torch.equal(out["join.weight"], model.join.weight)
