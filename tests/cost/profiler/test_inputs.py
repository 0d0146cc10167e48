"""Made-up arguments."""

from __future__ import annotations

import pytest
import torch

from graphpipe.cost.profiler.facts import TensorFact, facts_at
from graphpipe.cost.profiler.inputs import Arguments, index_limits, runner, tensor_of
from graphpipe.cost.profiler.measure import changes_first_argument
from tests.cost.profiler.model import hard_graph

CPU = torch.device("cpu")


def _fact(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> TensorFact:
    return TensorFact(shape, stride, dtype, False, "", "x", "x", 0)


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((2, 3), (3, 1)),
        ((2, 3), (1, 2)),
        ((4, 5), (0, 1)),
        ((3, 2), (10, 4)),
        ((), ()),
        ((0, 2), (2, 1)),
    ],
)
def test_shapes_and_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    tensor = tensor_of(_fact(shape, stride), CPU)
    assert tuple(tensor.shape) == shape
    assert tensor.stride() == stride


def test_values_are_harmless() -> None:
    floats = tensor_of(_fact((1000,), (1,)), CPU)
    assert 0.1 <= float(floats.min()) < float(floats.max()) <= 0.9
    assert bool(tensor_of(_fact((9,), (1,), torch.bool), CPU).all())
    assert int(tensor_of(_fact((9,), (1,), torch.int64), CPU).sum()) == 0
    indices = tensor_of(_fact((1000,), (1,), torch.int64), CPU, 50)
    assert int(indices.min()) >= 0
    assert 40 < int(indices.max()) < 50
    offsets = tensor_of(_fact((4,), (1,), torch.int64), CPU, -28)
    assert offsets.tolist() == [0, 7, 14, 21]
    assert tensor_of(_fact((2,), (1,), torch.complex64), CPU).tolist() == [0.5, 0.5]


def test_look_ups_are_spread_over_their_table() -> None:
    graph = hard_graph()
    facts = facts_at(graph, 4)
    bag = next(item for name, item in facts.items() if name.startswith("embedding_bag"))
    limits = index_limits(bag)
    assert sorted(limits.values()) == [-28, 50]
    loss = next(item for name, item in facts.items() if name.startswith("cross_entropy"))
    assert list(index_limits(loss).values()) == [16]


def test_every_op_runs_on_its_arguments_and_repeats_are_fresh() -> None:
    graph = hard_graph()
    for facts in facts_at(graph, 3).values():
        made = Arguments(facts, CPU, inplace=changes_first_argument(facts))
        for _ in range(2):
            args, kwargs, wanted = made.make()
            outputs = runner(facts, CPU)(*args, **kwargs)
            if isinstance(outputs, torch.Tensor):
                assert tuple(outputs.shape) == facts.outputs[0].shape
                assert outputs.requires_grad == facts.outputs[0].requires_grad
            assert len(wanted) == len({t.name for t in facts.tensors if t.requires_grad})
            # Nothing refers to the model's own parameters.
            owned = {id(value) for value in graph.program.state.values()}  # type: ignore[union-attr]
            assert not any(id(value) in owned for value in args)
