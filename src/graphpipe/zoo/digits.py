"""Two towers on real data: handwritten digits and their captions.

The images are the 1,797 handwritten digits of 8 x 8 pixels that scikit-learn ships (a
part of the UCI set "Optical Recognition of Handwritten Digits"). The text of an image is
a caption of its label, such as "a handwritten seven". Image and text tower are trained
jointly with the symmetric in-batch contrastive loss; afterwards an image is classified by
the caption that it is most similar to, without a classifier ever having been trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn

from graphpipe.zoo.contrastive import Similarity, contrastive_loss
from graphpipe.zoo.job import Batch, Job
from graphpipe.zoo.transformer import Encoder, Patches, Tokens

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = (
    "a handwritten {}",
    "a {} written by hand",
    "the digit {}",
    "a scan of the number {}",
)
HELD_OUT = 360
"""Images that training never sees, out of 1,797."""


class Tokenizer:
    """Words to ids; 0 is padding. Captions are padded to the longest template."""

    def __init__(self) -> None:
        words = {word for template in TEMPLATES for word in template.split() if word != "{}"}
        self.words = ("<pad>", *sorted({*words, *NAMES}))
        self.length = max(len(template.split()) for template in TEMPLATES)
        self._ids = {word: i for i, word in enumerate(self.words)}

    def encode(self, captions: list[str]) -> Tensor:
        """Ids of each caption: int64 [captions, length]."""
        rows = [[self._ids[word] for word in caption.split()] for caption in captions]
        return torch.tensor([row + [0] * (self.length - len(row)) for row in rows])


class ImageTower(nn.Module):
    """Images [b, 1, 8, 8] to embeddings [b, width].

    All 16 patches are projected together: with a mean over patches instead, training needs
    three times as many epochs.
    """

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.patches = Patches(1, 8, 2, width)
        self.encoder = Encoder(width, heads, layers)
        self.project = nn.Linear(16 * width, width, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.project(self.encoder(self.patches(images)).flatten(1))
        return out


class TextTower(nn.Module):
    """Token ids [b, length] to embeddings [b, width]; padding is neither seen nor counted."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = Tokens(vocabulary, length, width)
        self.encoder = Encoder(width, heads, layers)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        seen = ids != 0
        x = self.encoder(self.tokens(ids), seen[:, None, None, :])
        weights = seen.to(x.dtype)[:, :, None]
        out: Tensor = self.project((x * weights).sum(1) / weights.sum(1))
        return out


class DigitsModel(nn.Module):
    """Two towers; the output is the matrix of similarities, images x texts."""

    def __init__(
        self, *, width: int = 64, heads: int = 4, image_layers: int = 3, text_layers: int = 2
    ) -> None:
        super().__init__()
        tokenizer = Tokenizer()
        self.image = ImageTower(width, heads, image_layers)
        self.text = TextTower(len(tokenizer.words), tokenizer.length, width, heads, text_layers)
        self.similarity = Similarity()

    def forward(self, images: Tensor, ids: Tensor) -> Tensor:
        """[b, b] from images [b, 1, 8, 8] and caption ids [b, length]."""
        out: Tensor = self.similarity(self.image(images), self.text(ids))
        return out


@dataclass(frozen=True, eq=False)
class Digits:
    """Images in [-1, 1], [n, 1, 8, 8], and labels, int64 [n], for training and held out."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def batches(self, batch_size: int, epoch: int) -> Iterator[Batch]:
        """The mini-batches of an epoch, in an order and with captions of its own.

        The last samples that do not fill a mini-batch wait for another epoch's order.
        """
        draw = torch.Generator().manual_seed(epoch)
        order = torch.randperm(len(self.train_labels), generator=draw)
        for picked in torch.split(order, batch_size):
            if len(picked) < batch_size:
                return
            labels = self.train_labels[picked]
            templates = torch.randint(len(TEMPLATES), (len(picked),), generator=draw)
            captions = [
                TEMPLATES[template].format(NAMES[label])
                for template, label in zip(templates.tolist(), labels.tolist(), strict=True)
            ]
            yield Batch((self.train_images[picked], Tokenizer().encode(captions)), {}, labels)

    def zero_shot_accuracy(self, model: nn.Module) -> float:
        """Share of held-out digits whose best caption, of ten, is the right one."""
        captions = Tokenizer().encode([TEMPLATES[0].format(name) for name in NAMES])
        device = next(model.parameters()).device
        with torch.no_grad():
            scores = model(self.test_images.to(device), captions.to(device))
        return float((scores.argmax(1).cpu() == self.test_labels).float().mean())


@cache
def load_digits() -> Digits:
    """Reads scikit-learn's digits and sets :data:`HELD_OUT` of them aside (always the same)."""
    from sklearn.datasets import load_digits as read

    data = read()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8.0 - 1.0
    labels = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:HELD_OUT], order[HELD_OUT:]
    return Digits(images[train], labels[train], images[test], labels[test])


def digits(*, width: int = 64, heads: int = 4, image_layers: int = 3, text_layers: int = 2) -> Job:
    """The job: model, the first mini-batch of epoch 0 as example, loss and data."""
    data = load_digits()
    example = next(data.batches(8, 0))
    build = partial(
        DigitsModel, width=width, heads=heads, image_layers=image_layers, text_layers=text_layers
    )
    return Job(
        build,
        example.args,
        targets=example.targets,
        loss_fn=contrastive_loss,
        data=data.batches,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3, weight_decay=0.01),
        batch_size=128,
        name="digits",
    )
