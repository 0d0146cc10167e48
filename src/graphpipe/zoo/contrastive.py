"""The symmetric in-batch contrastive loss of two-tower models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def contrastive_loss(logits: Tensor, labels: Tensor | None = None) -> Tensor:
    """Every image should find its own text among those of the mini-batch, and the reverse.

    The value for one sample depends on all the others, so the loss of a mini-batch is not
    the mean of the losses of its parts.

    Args:
        logits: [b, b], scaled similarities; row i is image i, column j is text j.
        labels: [b], integers. Texts of the same label count as right for one another
            (captions repeat when there are few classes). None: only text i is right for
            image i.

    Returns:
        Scalar: the mean over both directions of -log(probability of a right answer).
    """
    if labels is None:
        targets = torch.arange(logits.shape[0], device=logits.device)
        return 0.5 * (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets))
    wrong = labels[:, None] != labels[None, :]
    # log_softmax first: the difference of two log-sums of large logits would lose digits.
    rows = logits.log_softmax(1).masked_fill(wrong, float("-inf")).logsumexp(1)
    columns = logits.log_softmax(0).masked_fill(wrong, float("-inf")).logsumexp(0)
    return -0.5 * (rows.mean() + columns.mean())


class Similarity(nn.Module):
    """Scaled cosine similarity of two embeddings [b, w]: [b, b]; the scale is learned."""

    def __init__(self, scale: float = 10.0) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(scale).log())

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        """Rows are images, columns are texts."""
        return self.log_scale.exp() * F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).T
