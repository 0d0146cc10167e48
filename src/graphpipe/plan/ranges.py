"""Which samples a task covers: the one place that knows.

Copy c of R owns the samples [floor(c B / R), floor((c + 1) B / R)); micro-batch i of a
stage within a copy covers the copy's samples [i b, min((i + 1) b, n)), n of them. So a
mini-batch that does not divide has a short last micro-batch, and nothing is dropped.
"""

from __future__ import annotations

from typing import NamedTuple


class SampleRange(NamedTuple):
    """Samples ``start <= x < stop`` of the mini-batch."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)


def copy_range(copy: int, copies: int, batch_size: int) -> SampleRange:
    """The samples of the mini-batch that copy number ``copy`` owns."""
    return SampleRange(copy * batch_size // copies, (copy + 1) * batch_size // copies)


def micro_batch_count(samples: int, micro_batch: int) -> int:
    """Tasks of one kind that a stage runs for a copy of ``samples`` samples."""
    return -(-samples // micro_batch)


def micro_batch_range(owned: SampleRange, micro_batch: int, index: int) -> SampleRange:
    """Samples of micro-batch number ``index`` of a stage, within the copy's ``owned`` range."""
    start = owned.start + index * micro_batch
    return SampleRange(start, min(start + micro_batch, owned.stop))


def smallest_micro_batch(micro_batch: int, copies: int, batch_size: int) -> int:
    """Samples of the shortest task of a stage: of the last one where sizes do not divide."""
    # Copies own floor(B / R) samples, or one more where B / R is no integer.
    owned = {batch_size // copies, -(-batch_size // copies)} - {0}
    return min(samples % micro_batch or min(micro_batch, samples) for samples in owned)
