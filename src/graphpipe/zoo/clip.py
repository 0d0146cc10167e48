"""A two-tower image-text model in the manner of CLIP, with the in-batch contrastive loss."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from graphpipe.zoo.contrastive import Similarity, contrastive_loss
from graphpipe.zoo.job import Batch, Job
from graphpipe.zoo.synthetic import synthetic_job
from graphpipe.zoo.transformer import Encoder, Patches, Tokens


class CLIP(nn.Module):
    """A vision transformer and a causal text transformer, projected to one space.

    Args:
        image: (pixels a side, patch size, width, heads, layers) of the image tower.
        text: (vocabulary, length, width, heads, layers) of the text tower.
        shared: Width of the common space.
    """

    def __init__(
        self,
        image: tuple[int, int, int, int, int],
        text: tuple[int, int, int, int, int],
        shared: int,
    ) -> None:
        super().__init__()
        size, patch, width, heads, layers = image
        self.patches = Patches(3, size, patch, width)
        self.image = Encoder(width, heads, layers)
        self.image_projection = nn.Linear(width, shared, bias=False)
        vocabulary, length, width, heads, layers = text
        self.tokens = Tokens(vocabulary, length, width)
        self.text = Encoder(width, heads, layers, causal=True)
        self.text_projection = nn.Linear(width, shared, bias=False)
        self.similarity = Similarity(1 / 0.07)

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        """Similarities [b, b] from images [b, 3, size, size] and token ids [b, length]."""
        image = self.image_projection(self.image(self.patches(images)).mean(1))
        text = self.text_projection(self.text(self.tokens(ids))[:, -1])
        out: Tensor = self.similarity(image, text)
        return out


def clip(
    *,
    image: tuple[int, int, int, int, int] = (224, 16, 768, 12, 12),
    text: tuple[int, int, int, int, int] = (49408, 77, 512, 8, 12),
    shared: int = 512,
    batch_size: int = 512,
    name: str = "clip",
) -> Job:
    """The job: random images and captions; the default is of the size of ViT-B/16."""
    size = image[0]
    vocabulary, length = text[:2]

    def draw(samples: int, generator: torch.Generator) -> Batch:
        images = torch.randn(samples, 3, size, size, generator=generator)
        return Batch((images, torch.randint(vocabulary, (samples, length), generator=generator)))

    model = partial(CLIP, image, text, shared)
    return synthetic_job(name, model, draw, contrastive_loss, batch_size=batch_size)
