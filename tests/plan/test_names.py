"""Stages have names that a person recognises, all different."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.names import stage_names


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.blocks(x)) * 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.head = Tower(), Tower(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.image(x) + self.text(x))


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    return capture(Model(), (torch.randn(2, 4),), name="model")


def ops(graph: ModelGraph, *modules: str) -> list[str]:
    found = [op.name for op in graph.ops if op.module.startswith(modules)]
    assert found
    return found


@pytest.mark.parametrize(
    ("modules", "name"),
    [
        (("image",), "image"),
        (("image.blocks",), "image.blocks"),
        (("image.blocks.1",), "image.blocks.1"),
        (("image.blocks.1.0",), "image.blocks.1.0"),
        (("image.blocks.0", "image.blocks.1"), "image.blocks.0..1"),
        (("image.blocks.2", "image.norm"), "image.blocks..norm"),
        (("image", "text"), "image + text"),
        (("image.blocks.2", "text.norm", "head"), "image..head"),
    ],
)
def test_a_stage_is_named_by_its_modules(
    graph: ModelGraph, modules: tuple[str, ...], name: str
) -> None:
    found = ops(graph, *modules)
    assert stage_names(graph, [found]) == [name]
    assert stage_names(graph, [found[::-1]]) == [name]


def test_names_differ_and_given_ones_stay(graph: ModelGraph) -> None:
    own = [op.name for op in graph.ops if op.module == "image"]
    first, second = ops(graph, "image.norm") + own, ops(graph, "text.norm")
    assert stage_names(graph, [first, first, second], ["", "", "mine"]) == [
        "image (part)",
        "image (part) (2)",
        "mine",
    ]
    assert stage_names(graph, [()]) == ["empty"]
