"""Caches as cold as they are in training.

An op that is repeated by itself finds its weights in a cache. In training the rest of the
model has run in between, so a model larger than the caches reads its weights from memory
every time. Between repeats, as much memory is therefore written as the model has
parameters, up to a size that no cache holds.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from graphpipe.graph.model_graph import ModelGraph

MOST_BYTES = 64 * 2**20
LEAST_BYTES = 2**20
"""A model smaller than this stays in the caches in training as well."""
TOUCHED_BYTES = 4 * 2**20
"""Activations up to this size are in a cache when their reader runs."""


class Evictor:
    """Evicts what a model of this size evicts.

    Args:
        graph: The model.
        device: Whose caches.
    """

    def __init__(self, graph: ModelGraph, device: torch.device) -> None:
        size = min(MOST_BYTES, sum(item.nbytes for item in graph.parameters))
        self._memory = torch.zeros(size // 4 if size >= LEAST_BYTES else 0, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return self._memory.nbytes

    def evict(self) -> None:
        """Writes them."""
        if self._memory.numel():
            self._memory.add_(1.0)

    def touch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Brings activations back that were evicted with the weights."""
        if self._memory.numel():
            for tensor in tensors:
                if tensor.nbytes <= TOUCHED_BYTES:
                    tensor.detach().sum()
