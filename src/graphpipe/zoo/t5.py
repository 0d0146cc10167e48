"""An encoder-decoder language model in the manner of T5.

What makes it hard to cut: every decoder layer reads the encoder's output, one table of
relative positions serves all layers of a side, and one embedding serves encoder, decoder
and head.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from graphpipe.zoo.gpt2 import token_loss
from graphpipe.zoo.job import Batch, Job
from graphpipe.zoo.synthetic import synthetic_job
from graphpipe.zoo.transformer import Attention, FeedForward


class RelativePositions(nn.Module):
    """A learned bias [heads, s, s] by distance, in logarithmic buckets (Raffel et al., 2020)."""

    def __init__(self, heads: int, length: int, *, causal: bool, buckets: int = 32) -> None:
        super().__init__()
        self.bias = nn.Embedding(buckets, heads)
        self.causal = causal
        offsets = torch.arange(length)[None, :] - torch.arange(length)[:, None]
        self.register_buffer("bucket", self._bucket(offsets, buckets), persistent=False)

    def _bucket(self, offsets: Tensor, buckets: int) -> Tensor:
        first = torch.zeros_like(offsets)
        if self.causal:
            distance = (-offsets).clamp(min=0)
        else:
            buckets //= 2
            first = (offsets > 0).long() * buckets
            distance = offsets.abs()
        exact = buckets // 2
        scale = (buckets - exact) / math.log(128 / exact)
        far = exact + ((distance.clamp(min=1).float() / exact).log() * scale).long()
        return first + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))

    def forward(self) -> Tensor:
        bias: Tensor = self.bias(self.get_buffer("bucket")).permute(2, 0, 1)
        if self.causal:
            size = bias.shape[-1]
            future = torch.ones(size, size, dtype=torch.bool, device=bias.device).triu(1)
            bias = bias.masked_fill(future, float("-inf"))
        return bias


class Layer(nn.Module):
    """Self-attention, in the decoder attention to the encoder's output, feed-forward."""

    def __init__(self, width: int, heads: int, *, decoder: bool) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attention = Attention(width, heads, bias=False)
        self.norm2 = nn.RMSNorm(width) if decoder else None
        self.cross = Attention(width, heads, bias=False) if decoder else None
        self.norm3 = nn.RMSNorm(width)
        self.feed_forward = FeedForward(width, bias=False)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask=bias)
        if self.cross is not None and self.norm2 is not None:
            x = x + self.cross(self.norm2(x), memory)
        out: Tensor = x + self.feed_forward(self.norm3(x))
        return out


class T5(nn.Module):
    """Encoder and decoder of equal depth."""

    def __init__(
        self,
        vocabulary: int,
        source_length: int,
        target_length: int,
        width: int,
        heads: int,
        layers: int,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.encoder_positions = RelativePositions(heads, source_length, causal=False)
        self.encoder = nn.ModuleList(Layer(width, heads, decoder=False) for _ in range(layers))
        self.encoder_norm = nn.RMSNorm(width)
        self.decoder_positions = RelativePositions(heads, target_length, causal=True)
        self.decoder = nn.ModuleList(Layer(width, heads, decoder=True) for _ in range(layers))
        self.decoder_norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits [b, target_length, vocabulary] from ids of source and shifted target."""
        memory = self.embedding(source)
        bias = self.encoder_positions()
        for layer in self.encoder:
            memory = layer(memory, bias)
        memory = self.encoder_norm(memory)
        x = self.embedding(target)
        bias = self.decoder_positions()
        for layer in self.decoder:
            x = layer(x, bias, memory)
        out: Tensor = self.head(self.decoder_norm(x))
        return out


def t5(
    *,
    vocabulary: int = 32128,
    source_length: int = 512,
    target_length: int = 512,
    width: int = 512,
    heads: int = 8,
    layers: int = 6,
    batch_size: int = 128,
    name: str = "t5",
) -> Job:
    """The job: random source and target sequences; the default is of the size of T5-small."""

    def draw(samples: int, generator: torch.Generator) -> Batch:
        source = torch.randint(vocabulary, (samples, source_length), generator=generator)
        text = torch.randint(vocabulary, (samples, target_length + 1), generator=generator)
        given, wanted = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        return Batch((source, given), {}, wanted)

    model = partial(T5, vocabulary, source_length, target_length, width, heads, layers)
    return synthetic_job(name, model, draw, token_loss, batch_size=batch_size)
