"""Jobs whose data is drawn at random: for planning, benchmarks and smoke runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from graphpipe.zoo.job import Batch, Job

Draw = Callable[[int, torch.Generator], Batch]
"""Draws a mini-batch of n samples."""

BATCHES_PER_EPOCH = 100


def synthetic_job(
    name: str,
    model: Callable[[], nn.Module],
    draw: Draw,
    loss_fn: Callable[..., torch.Tensor] | None,
    *,
    batch_size: int,
) -> Job:
    """A job with two drawn samples as the example and 100 drawn mini-batches an epoch."""

    def data(samples: int, epoch: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(1 + epoch)
        for _ in range(BATCHES_PER_EPOCH):
            yield draw(samples, generator)

    example = draw(2, torch.Generator().manual_seed(0))
    return Job(
        model,
        example.args,
        example.kwargs,
        targets=example.targets,
        loss_fn=loss_fn,
        data=data,
        batch_size=batch_size,
        name=name,
    )
