"""A multi-modal transformer: one encoder a modality, joined by a linear.

The sizes are those of the evaluation of graph pipeline parallelism (Jeon et al., ASPLOS
2025): four branches of eight layers, width 1024, 16 heads, sequences of 256.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpipe.zoo.job import Batch, Job
from graphpipe.zoo.synthetic import synthetic_job
from graphpipe.zoo.transformer import Encoder


class MultiModalTransformer(nn.Module):
    """Encoders of equal width side by side; their outputs are joined feature by feature.

    Args:
        depths: Layers of each branch's encoder.
        width: Width of the encoders and of each modality's input features.
        heads: Attention heads.
        joint_layers: Transformer layers after the join.
        classes: Size of the output.
    """

    def __init__(
        self, depths: Sequence[int], width: int, heads: int, joint_layers: int, classes: int
    ) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Encoder(width, heads, depth) for depth in depths)
        self.join = nn.Linear(len(depths) * width, width)
        self.joint = Encoder(width, heads, joint_layers)
        self.head = nn.Linear(width, classes)

    def forward(self, *modalities: Tensor) -> Tensor:
        """[b, classes] from one tensor [b, sequence, width] a modality."""
        joined = torch.cat(
            [branch(x) for branch, x in zip(self.branches, modalities, strict=True)], dim=-1
        )
        out: Tensor = self.head(self.joint(F.gelu(self.join(joined))).mean(1))
        return out


def mmt(
    *,
    depths: Sequence[int] = (8, 8, 8, 8),
    width: int = 1024,
    heads: int = 16,
    sequence: int = 256,
    joint_layers: int = 0,
    classes: int = 1000,
    batch_size: int = 512,
    name: str = "mmt",
) -> Job:
    """The job; the inputs are already embedded features of each modality."""

    def draw(samples: int, generator: torch.Generator) -> Batch:
        features = tuple(torch.randn(samples, sequence, width, generator=generator) for _ in depths)
        return Batch(features, {}, torch.randint(classes, (samples,), generator=generator))

    model = partial(MultiModalTransformer, tuple(depths), width, heads, joint_layers, classes)
    return synthetic_job(name, model, draw, F.cross_entropy, batch_size=batch_size)
