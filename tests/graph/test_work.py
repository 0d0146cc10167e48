"""Work and saved memory of a capture against what eager PyTorch counts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from graphpipe.graph.capture import capture
from graphpipe.graph.expression import evaluate
from graphpipe.graph.model_graph import ModelGraph


class Mixed(nn.Module):
    """Convolution, attention, embedding with tied head, dropout, a frozen layer, in-place ops."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.embed = nn.Embedding(50, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, image: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        v = torch.relu_(self.conv(image)).flatten(2).transpose(1, 2)
        v = self.frozen(v)
        h = torch.cat([v, self.embed(ids)], dim=1)
        h = self.norm(F.gelu(self.block(h)))
        return h.mean(1) @ self.embed.weight.t()


def example(samples: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(samples)
    image = torch.randn(samples, 3, 4, 4, generator=generator)
    ids = torch.randint(0, 50, (samples, 5), generator=generator)
    return image, ids, torch.randint(0, 50, (samples,), generator=generator)


@lru_cache
def captured() -> tuple[ModelGraph, nn.Module]:
    model = Mixed()
    image, ids, labels = example(3)
    return capture(model, (image, ids), targets=labels, loss_fn=F.cross_entropy), model


@pytest.mark.parametrize("samples", [1, 4, 9])
def test_flops_equal_the_eager_counter(samples: int) -> None:
    graph, model = captured()
    image, ids, labels = example(samples)
    with FlopCounterMode(display=False) as forward:
        loss = F.cross_entropy(model(image, ids), labels)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    model.zero_grad()
    assert sum(evaluate(op.forward.flops, samples) for op in graph.ops) == (
        forward.get_total_flops()
    )
    assert sum(evaluate(op.backward.flops, samples) for op in graph.ops) == (
        backward.get_total_flops()
    )


@pytest.mark.parametrize("samples", [1, 4, 9])
def test_saved_bytes_equal_the_hooks_count_of_storages(samples: int) -> None:
    graph, model = captured()
    image, ids, labels = example(samples)
    state = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in state:
            kept[storage.data_ptr()] = storage
        return tensor

    assert graph.program is not None
    tensors = {"image": image, "ids": ids, "targets": labels}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = graph.program.module(samples, *(tensors[i.name] for i in graph.inputs))
    storages = {s.id: evaluate(s.bytes, samples) for op in graph.ops for s in op.saves}
    assert sum(storages.values()) == sum(storage.nbytes() for storage in kept.values())
    assert result[0].requires_grad


def test_storages_are_named_after_what_made_them_and_exclude_parameters() -> None:
    graph, _ = captured()
    names = {op.name for op in graph.ops} | {item.name for item in graph.inputs}
    for op in graph.ops:
        for storage in op.saves:
            assert storage.id.split(".")[0] in names
            assert storage.id not in graph.parameter_by_name
    frozen = next(op for op in graph.ops if op.module == "frozen")
    # Its input is needed by the convolution's relu anyway; the frozen layer itself keeps none.
    assert frozen.requires_grad
    assert frozen.saves == ()


def test_views_cost_nothing_and_look_ups_only_the_rows_they_touch() -> None:
    graph, _ = captured()
    for op in graph.ops:
        if op.target.split(".")[1] in ("flatten", "transpose", "t"):
            assert (op.forward.kernels, op.forward.bytes) == (0, 0)
    lookup = next(op for op in graph.ops if op.target == "aten.embedding.default")
    rows = 5 * 4
    # Indices, the rows that are read, the rows that are written.
    assert evaluate(lookup.forward.bytes, 4) == rows * 8 + 2 * rows * 8 * 4
    # The dense gradient is the whole table.
    assert evaluate(lookup.backward.bytes, 4) >= 50 * 8 * 4


def test_an_opaque_module_keeps_its_inputs_and_outputs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 6)))
    graph = capture(
        model, (torch.zeros(2, 4),), loss_fn=lambda out: out.sum(), opaque=["1"],
        per_sample_ops=["1"],
    )  # fmt: skip
    inner: Any = graph.op_by_name["_1"] if "_1" in graph.op_by_name else graph.ops[1]
    assert inner.target == "opaque"
    assert {(s.id, evaluate(s.bytes, 2)) for s in inner.saves} == {
        ("linear", 32),
        (inner.name, 48),
    }
    assert evaluate(inner.forward.flops, 2) == 2 * 30 * 2
