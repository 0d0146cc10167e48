"""A decoder-only language model in the manner of GPT-2, input embedding and head tied."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpipe.zoo.job import Batch, Job
from graphpipe.zoo.synthetic import synthetic_job
from graphpipe.zoo.transformer import Encoder, Tokens


class GPT2(nn.Module):
    """Causal transformer; the head's weight is the embedding's."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = Tokens(vocabulary, length, width)
        self.decoder = Encoder(width, heads, layers, causal=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [b, length, vocabulary] from token ids [b, length]."""
        out: Tensor = self.head(self.decoder(self.tokens(ids)))
        return out


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens: logits [b, s, v], targets [b, s]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt2(
    *,
    vocabulary: int = 50257,
    length: int = 1024,
    width: int = 768,
    heads: int = 12,
    layers: int = 12,
    batch_size: int = 64,
    name: str = "gpt2",
) -> Job:
    """The job: predict the next token of random text. The default has 124M parameters."""

    def draw(samples: int, generator: torch.Generator) -> Batch:
        text = torch.randint(vocabulary, (samples, length + 1), generator=generator)
        return Batch((text[:, :-1].contiguous(),), {}, text[:, 1:].contiguous())

    model = partial(GPT2, vocabulary, length, width, heads, layers)
    return synthetic_job(name, model, draw, token_loss, batch_size=batch_size)
