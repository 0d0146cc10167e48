"""An index that would lead astray is refused before anything is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from graphpipe.errors import CheckpointError
from graphpipe.runtime.checkpoint.folder import parse_index
from tests.runtime.checkpoint.indices import good_index


def test_a_good_index_comes_back() -> None:
    index = good_index()
    assert parse_index(index.to_json().encode(), "x") == index


def _chunk(data: Any, **change: Any) -> None:
    data["tensors"][0]["chunks"][1].update(change)


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "file elsewhere": (lambda d: _chunk(d, file="../model-00000.safetensors"), "pattern"),
    "overlap": (lambda d: _chunk(d, offsets=[0, 1]), "overlap"),
    "beyond": (lambda d: _chunk(d, offsets=[0, 3]), "beyond"),
    "gap": (lambda d: _chunk(d, shape=[4, 3]), "do not make up the whole"),
    "dimensions": (lambda d: _chunk(d, offsets=[0]), "number of dimensions"),
    "one place": (
        lambda d: _chunk(d, file="model-00000.safetensors", key="a.weight@0,0"), "one place"
    ),
    "no dtype": (lambda d: d["tensors"][0].update(dtype="load"), "is no dtype"),
    "no blocks": (lambda d: d["tensors"][0].update(chunks=[]), "do not make up the whole"),
    "twice": (lambda d: d["tensors"].append(d["tensors"][1]), "two tensors are called"),
    "alias": (lambda d: d["aliases"].update(b=["a.weight"]), "alias is used twice"),
    "alias of none": (lambda d: d["aliases"].update(z=["y"]), "belongs to no tensor"),
    "unknown field": (lambda d: d.update(pickle="x"), "pickle"),
    "version": (lambda d: d.update(version=2), "version"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_indices(name: str) -> None:
    change, text = WRONG[name]
    data = json.loads(good_index().to_json())
    change(data)
    with pytest.raises(CheckpointError, match=text):
        parse_index(json.dumps(data).encode(), "index.json")
