"""CANDLE-Uno: the response of tumour cells to pairs of drugs, from seven inputs.

The sizes are those of the evaluation of graph pipeline parallelism (Jeon et al., ASPLOS
2025): five towers of eight layers of width 4192, a joint part of four layers, no biases.
The two doses, of width 1, go straight to the join.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpipe.zoo.job import Batch, Job
from graphpipe.zoo.synthetic import synthetic_job

INPUTS = (1, 1, 942, 5270, 2048, 5270, 2048)
"""Doses of both drugs, expression of the cell's genes, then descriptors and fingerprints of
the first and of the second drug."""


def layers(size: int, width: int, count: int) -> nn.Sequential:
    """``count`` linears without bias, each followed by a ReLU."""
    sizes = [size] + [width] * count
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(given, wanted, bias=False), nn.ReLU())
            for given, wanted in pairwise(sizes)
        )
    )


class CandleUno(nn.Module):
    """A tower for each input wider than 1; everything is concatenated for the joint part."""

    def __init__(
        self, inputs: Sequence[int], width: int, tower_layers: int, joint_layers: int
    ) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Identity() if size == 1 else layers(size, width, tower_layers) for size in inputs
        )
        joined = sum(1 if size == 1 else width for size in inputs)
        self.joint = layers(joined, width, joint_layers)
        self.output = nn.Linear(width, 1, bias=False)

    def forward(self, *features: Tensor) -> Tensor:
        """Predicted growth [b] from one tensor [b, size] an input."""
        joined = torch.cat(
            [tower(x) for tower, x in zip(self.towers, features, strict=True)], dim=-1
        )
        out: Tensor = self.output(self.joint(joined))
        return out.squeeze(-1)


def candle_uno(
    *,
    inputs: Sequence[int] = INPUTS,
    width: int = 4192,
    tower_layers: int = 8,
    joint_layers: int = 4,
    batch_size: int = 32768,
    name: str = "candle-uno",
) -> Job:
    """The job: regression with the mean squared error."""

    def draw(samples: int, generator: torch.Generator) -> Batch:
        features = tuple(torch.rand(samples, size, generator=generator) for size in inputs)
        return Batch(features, {}, torch.rand(samples, generator=generator) - 0.5)

    model = partial(CandleUno, tuple(inputs), width, tower_layers, joint_layers)
    return synthetic_job(name, model, draw, F.mse_loss, batch_size=batch_size)
