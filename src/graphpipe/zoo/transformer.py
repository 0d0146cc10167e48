"""Transformer blocks shared by the models of the zoo, in plain torch.

Shapes: b samples, s tokens, w width; every block maps [b, s, w] to [b, s, w]. Layer
normalisation comes before each sub-layer (pre-norm); there is no dropout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head attention; queries from ``x``, keys and values from ``context`` or ``x``.

    Args:
        width: w; a multiple of ``heads``.
        heads: Number of heads.
        causal: Token i sees the tokens up to i only.
        bias: Whether the projections have a bias.
    """

    def __init__(self, width: int, heads: int, *, causal: bool = False, bias: bool = True) -> None:
        super().__init__()
        assert width % heads == 0
        self.heads = heads
        self.causal = causal
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, width, bias=bias)
        self.value = nn.Linear(width, width, bias=bias)
        self.output = nn.Linear(width, width, bias=bias)

    def _split(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        return x.view(samples, tokens, self.heads, width // self.heads).transpose(1, 2)

    def forward(
        self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """``mask``: added to the scores, or boolean (True: seen); broadcast to [b, heads, s, s]."""
        source = x if context is None else context
        heads = F.scaled_dot_product_attention(
            self._split(self.query(x)),
            self._split(self.key(source)),
            self._split(self.value(source)),
            attn_mask=mask,
            is_causal=self.causal and mask is None,
        )
        joined: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return joined


class FeedForward(nn.Sequential):
    """Two linears with a GELU between; the hidden width is ``expansion`` times w."""

    def __init__(self, width: int, *, expansion: int = 4, bias: bool = True) -> None:
        super().__init__(
            nn.Linear(width, expansion * width, bias=bias),
            nn.GELU(),
            nn.Linear(expansion * width, width, bias=bias),
        )


class Block(nn.Module):
    """Self-attention and feed-forward, each with a residual connection."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask=mask)
        out: Tensor = x + self.feed_forward(self.norm2(x))
        return out


class Encoder(nn.Module):
    """``layers`` blocks and a final normalisation."""

    def __init__(self, width: int, heads: int, layers: int, *, causal: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, causal=causal) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        out: Tensor = self.norm(x)
        return out


class Patches(nn.Module):
    """Cuts images [b, channels, size, size] into patches and embeds them: [b, patches, w].

    Learned positions are added.
    """

    def __init__(self, channels: int, size: int, patch: int, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.randn((size // patch) ** 2, width) * 0.02)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.project(images).flatten(2).transpose(1, 2) + self.positions
        return out


class Tokens(nn.Module):
    """Embeds token ids [b, s] with learned positions: [b, s, w]."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.embedding(ids) + self.positions
        return out
