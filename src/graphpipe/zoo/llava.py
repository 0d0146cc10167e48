"""A vision-language model in the manner of LLaVA: image tower, projector, decoder.

The tower is a vision transformer (ViT-L by default), the decoder has the shape of Llama 7B
(Touvron et al., 2023). A sample may hold several images; each is pooled to a fixed number
of tokens, which stand before the text.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpipe.zoo.gpt2 import token_loss
from graphpipe.zoo.job import Batch, Job
from graphpipe.zoo.synthetic import synthetic_job
from graphpipe.zoo.transformer import Encoder, Patches


class Rotary(nn.Module):
    """Rotates pairs of features by an angle that grows with the position (Su et al., 2021)."""

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        frequencies = 10000.0 ** (-torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(length).float(), frequencies)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, heads, length, size] to the same."""
        first, second = x.chunk(2, dim=-1)
        cosine, sine = self.get_buffer("cosine"), self.get_buffer("sine")
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class DecoderLayer(nn.Module):
    """Causal attention with rotary positions and a gated feed-forward, RMS-normalised."""

    def __init__(self, width: int, heads: int, hidden: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.rotary = Rotary(length, width // heads)
        self.norm2 = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def _split(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        return x.view(samples, tokens, self.heads, width // self.heads).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        heads = F.scaled_dot_product_attention(
            self.rotary(self._split(self.query(y))),
            self.rotary(self._split(self.key(y))),
            self._split(self.value(y)),
            is_causal=True,
        )
        x = x + self.output(heads.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class LLaVA(nn.Module):
    """Images through tower and projector, then the decoder over image tokens and text.

    Args:
        image: (pixels a side, patch size, width, heads, layers) of the tower.
        decoder: (vocabulary, width, heads, hidden width, layers).
        images: Images of a sample.
        image_tokens: Tokens that an image is pooled to.
        text: Text tokens of a sample.
        frozen: Whether the tower's parameters are frozen.
    """

    def __init__(
        self,
        image: tuple[int, int, int, int, int],
        decoder: tuple[int, int, int, int, int],
        images: int,
        image_tokens: int,
        text: int,
        frozen: bool,
    ) -> None:
        super().__init__()
        size, patch, tower_width, tower_heads, tower_layers = image
        vocabulary, width, heads, hidden, layers = decoder
        self.images = images
        self.pool = (size // patch) ** 2 // image_tokens
        self.patches = Patches(3, size, patch, tower_width)
        self.tower = Encoder(tower_width, tower_heads, tower_layers)
        self.projector = nn.Sequential(
            nn.Linear(tower_width, width), nn.GELU(), nn.Linear(width, width)
        )
        self.embedding = nn.Embedding(vocabulary, width)
        length = images * image_tokens + text
        self.layers = nn.ModuleList(
            DecoderLayer(width, heads, hidden, length) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if frozen:
            self.patches.requires_grad_(False)
            self.tower.requires_grad_(False)

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        """Logits [b, text, vocabulary] from images [b, images, 3, size, size] and ids [b, text]."""
        seen = self.tower(self.patches(images.flatten(0, 1)))
        pooled = F.avg_pool1d(seen.transpose(1, 2), self.pool).transpose(1, 2)
        projected = self.projector(pooled)
        _, tokens, width = projected.shape
        joined = projected.reshape(-1, self.images * tokens, width)
        x = torch.cat([joined, self.embedding(ids)], dim=1)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x[:, self.images * tokens :]))
        return out


def llava(
    *,
    image: tuple[int, int, int, int, int] = (224, 14, 1024, 16, 24),
    decoder: tuple[int, int, int, int, int] = (32000, 4096, 32, 11008, 32),
    images: int = 1,
    image_tokens: int = 64,
    text: int = 512,
    frozen: bool = True,
    batch_size: int = 128,
    name: str = "llava",
) -> Job:
    """The job: predict the text after the images; the default has a frozen ViT-L and 7B."""
    size = image[0]
    vocabulary = decoder[0]

    def draw(samples: int, generator: torch.Generator) -> Batch:
        pictures = torch.randn(samples, images, 3, size, size, generator=generator)
        words = torch.randint(vocabulary, (samples, text + 1), generator=generator)
        given, wanted = words[:, :-1].contiguous(), words[:, 1:].contiguous()
        return Batch((pictures, given), {}, wanted)

    model = partial(LLaVA, image, decoder, images, image_tokens, text, frozen)
    return synthetic_job(name, model, draw, token_loss, batch_size=batch_size)
