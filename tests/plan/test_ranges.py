"""Sample ranges: nothing is dropped, nothing doubled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpipe.plan.ranges import (
    copy_range,
    micro_batch_count,
    micro_batch_range,
    smallest_micro_batch,
)


@given(batch_size=st.integers(1, 100), copies=st.integers(1, 9), micro_batch=st.integers(1, 40))
def test_micro_batches_of_all_copies_tile_the_mini_batch(
    batch_size: int, copies: int, micro_batch: int
) -> None:
    seen: list[int] = []
    for copy in range(copies):
        owned = copy_range(copy, copies, batch_size)
        for index in range(micro_batch_count(len(owned), micro_batch)):
            part = micro_batch_range(owned, micro_batch, index)
            assert 0 < len(part) <= micro_batch
            seen += range(part.start, part.stop)
    assert seen == list(range(batch_size))


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 5, 8, 20])
@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [2, 3, 8, 10, 12])
def test_the_smallest_micro_batch_is_the_shortest_of_all_ranges(
    micro_batch: int, copies: int, batch_size: int
) -> None:
    lengths = [
        len(micro_batch_range(owned, micro_batch, index))
        for copy in range(copies)
        for owned in [copy_range(copy, copies, batch_size)]
        for index in range(micro_batch_count(len(owned), micro_batch))
    ]
    assert smallest_micro_batch(micro_batch, copies, batch_size) == min(lengths)
