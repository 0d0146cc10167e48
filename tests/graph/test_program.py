"""A model's output put together again from its tensors."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from graphpipe.graph.program import OutputLeaf, OutputStructure


def test_every_kind_of_leaf_takes_its_place() -> None:
    spec = pytree.tree_structure({"loss": 0, "first": 0, "n": 0, "name": 0, "rest": (0,)})
    leaves = (
        OutputLeaf("loss"),
        OutputLeaf("value"),
        OutputLeaf("size", size="2*b+1"),
        OutputLeaf("constant", constant="clip"),
        OutputLeaf("value"),
    )
    restored = OutputStructure(spec, leaves).restore(["x", "y"], samples=4, loss=0.5)
    assert restored == {"loss": 0.5, "first": "x", "n": 9, "name": "clip", "rest": ("y",)}


def test_a_list_with_one_tensor_a_sample_is_as_long_as_the_batch() -> None:
    spec = pytree.tree_structure([0])
    structure = OutputStructure(spec, (OutputLeaf("samples"),))
    for samples in (1, 3):
        value = torch.arange(samples * 2.0)
        restored = structure.restore([value], samples=samples)
        assert isinstance(restored, list)
        assert [item.tolist() for item in restored] == value.view(samples, 2).tolist()
