"""Plain values come back as they were; nothing else can be written or read."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpipe.errors import CheckpointError
from graphpipe.runtime.checkpoint.values import decode, encode

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.text(), inner),
        st.dictionaries(st.one_of(st.integers(), st.tuples(st.integers(), st.text())), inner),
    ),
    max_leaves=12,
)


def there_and_back(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, "x"), allow_nan=False)), "x")


@given(VALUES)
def test_values_come_back(value: Any) -> None:
    assert there_and_back(value) == value


def test_kinds_of_their_own() -> None:
    got = there_and_back(
        {"a": Counter({2: 1, 3: 5}), "b": math.nan, "c": np.float32(0.1), "d": np.arange(3)}
    )
    assert got["a"] == Counter({2: 1, 3: 5})
    assert isinstance(got["a"], Counter)
    assert math.isnan(got["b"])
    assert got["c"] == float(np.float32(0.1))
    assert got["d"].tolist() == [0, 1, 2]
    for tensor in (
        torch.randn(2, 3).to(torch.bfloat16), torch.tensor(7), torch.zeros(0, 2),
        torch.tensor([True, False]), torch.get_rng_state(),
    ):  # fmt: skip
        other = there_and_back(tensor)
        assert other.dtype == tensor.dtype
        assert torch.equal(other, tensor)


@pytest.mark.parametrize("value", [object(), len, {"a": {1, 2}}, torch.zeros(1 << 23)])
def test_what_is_no_plain_data_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="plain data"):
        encode(value, "data")


@pytest.mark.parametrize(
    "value",
    [
        {"$float": "1"}, {"$float": []}, {"$tuple": 1}, {"$items": [[1]]}, {"$items": {}},
        {"$items": [[[1], 2]]}, {"$tensor": 3}, {"$pickle": "x"}, {"$tuple": [], "a": 1},
        {"$tensor": {"dtype": "load", "shape": [], "data": ""}},
        {"$tensor": {"dtype": "float32", "shape": [2], "data": "AAAA"}},
        {"$tensor": {"dtype": "float32", "shape": [-1], "data": ""}},
        {"$tensor": {"dtype": "float32", "shape": [10**12, 10**12], "data": "AAAA"}},
        {"$array": {"dtype": "int64", "shape": [1], "data": "*"}},
        float("nan"),
    ],
)  # fmt: skip
def test_malformed_values_are_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"malformed \(at data\)"):
        decode(value, "data")
