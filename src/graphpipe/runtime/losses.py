"""How micro-batches of a loss term add up to the mini-batch's loss.

Every term is a weighted sum over its micro-batches; the weight of a micro-batch of n samples
is ``constant + n * slope`` (see ``LossTerm`` for the reductions). Gradients get the same
weights, so that summing them over micro-batches, replicas and copies gives the gradient of
the mini-batch's loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from graphpipe.graph.model_graph import LossTerm, ModelGraph
from graphpipe.runtime.transport import Handle, Transport

Weight = tuple[float, float]
"""(constant, per sample)."""


def term_weight(term: LossTerm, batch_size: int, count: float | None) -> Weight:
    """The weight of one term.

    Args:
        term: The term.
        batch_size: B, samples of the mini-batch.
        count: For ``sum_count``: sum of the count over the mini-batch.
    """
    if term.reduction == "sum":
        return (term.sign, 0.0)
    if term.reduction == "sum_count":
        assert count is not None
        return (term.sign / divisor(term, count), 0.0)
    return (0.0, term.sign / batch_size)


def divisor(term: LossTerm, count: float) -> float:
    """What a ``sum_count`` term is divided by."""
    count += term.count_offset
    if term.count_min is not None:
        count = max(count, term.count_min)
    # A mean over nothing is nan in a single process too.
    return count if count else math.nan


def counted_terms(graph: ModelGraph) -> list[int]:
    """Numbers of the terms that divide by a count that the inputs alone decide."""
    return [
        i
        for i, term in enumerate(graph.loss_terms)
        if term.reduction == "sum_count" and term.count_from_inputs
    ]


def add_losses(
    rank: int,
    transport: Transport,
    terms: int,
    losses: Sequence[tuple[float, int, torch.Tensor]],
) -> tuple[torch.Tensor, Handle]:
    """Starts to add up the loss terms of the mini-batch, weighted, over all ranks.

    Args:
        rank: The rank.
        transport: Where the reduction goes.
        terms: How many terms there are.
        losses: (weight, term, value) of each micro-batch that ran here.

    Returns:
        The sums by term, which hold on every rank once the handle is complete.
    """
    total = torch.zeros(terms, dtype=torch.float64)
    for number in range(terms):
        mine = [(weight, value) for weight, term, value in losses if term == number]
        if mine:
            weights = torch.tensor([weight for weight, _ in mine], dtype=torch.float64)
            values = torch.stack([value.reshape(()) for _, value in mine])
            total[number] = torch.dot(weights, values.to("cpu", torch.float64))
    return total, transport.all_reduce(rank, tuple(range(transport.world_size)), total)


def ancestors(graph: ModelGraph, names: Sequence[str]) -> list[str]:
    """The ops that ``names`` depend on, themselves included, in graph order."""
    by_name: Mapping[str, object] = graph.op_by_name
    wanted = {name for name in names if name in by_name}
    for op in reversed(graph.ops):
        if op.name in wanted:
            wanted.update(source for source in op.inputs if source in by_name)
    return [op.name for op in graph.ops if op.name in wanted]
