"""A recommendation model: embedding tables, a bottom and a top perceptron (DLRM).

The sizes are those of the evaluation of graph pipeline parallelism (Jeon et al., ASPLOS
2025): 24 tables of a million rows of 64 numbers, 100 rows a bag, dense features of 2048
through five layers of 4096, a top of four layers of 4096 and one output. At that size
the tables hold 6.1 GB: build the model on the meta device for planning.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpipe.zoo.job import Batch, Job
from graphpipe.zoo.synthetic import synthetic_job


def perceptron(sizes: list[int], *, last_activation: bool) -> nn.Sequential:
    """Linears between consecutive sizes, each followed by a ReLU, the last one on request."""
    layers: list[nn.Module] = []
    for i, (given, wanted) in enumerate(pairwise(sizes)):
        layers.append(nn.Linear(given, wanted))
        if last_activation or i < len(sizes) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """The bags of every table and the bottom's output, concatenated, go to the top.

    Args:
        tables: Number of tables.
        rows: Rows of each table.
        features: Numbers in a row.
        bottom: Layer sizes of the bottom, the dense input first.
        top: Layer sizes of the top after its input, the output last.
        sparse: Whether the tables' gradients are sparse tensors.
    """

    def __init__(
        self,
        tables: int,
        rows: int,
        features: int,
        bottom: list[int],
        top: list[int],
        *,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, features, mode="sum", sparse=sparse) for _ in range(tables)
        )
        self.bottom = perceptron(bottom, last_activation=True)
        self.top = perceptron([bottom[-1] + tables * features, *top], last_activation=False)

    def forward(self, dense: Tensor, *bags: Tensor) -> Tensor:
        """Logits [b] from dense features [b, d] and, for each table, row numbers [b, bag]."""
        looked_up = [table(bag) for table, bag in zip(self.tables, bags, strict=True)]
        out: Tensor = self.top(torch.cat([self.bottom(dense), *looked_up], dim=-1))
        return out.squeeze(-1)


def dlrm(
    *,
    tables: int = 24,
    rows: int = 1_000_000,
    features: int = 64,
    bag: int = 100,
    dense: int = 2048,
    width: int = 4096,
    bottom_layers: int = 5,
    top_layers: int = 4,
    sparse: bool = False,
    batch_size: int = 8192,
    name: str = "dlrm",
) -> Job:
    """The job: click or no click, binary cross-entropy."""

    def draw(samples: int, generator: torch.Generator) -> Batch:
        bags = tuple(
            torch.randint(rows, (samples, bag), generator=generator) for _ in range(tables)
        )
        clicks = torch.randint(2, (samples,), generator=generator).float()
        return Batch((torch.randn(samples, dense, generator=generator), *bags), {}, clicks)

    model = partial(
        DLRM,
        tables,
        rows,
        features,
        [dense] + [width] * bottom_layers,
        [width] * top_layers + [1],
        sparse=sparse,
    )
    return synthetic_job(
        name, model, draw, F.binary_cross_entropy_with_logits, batch_size=batch_size
    )
