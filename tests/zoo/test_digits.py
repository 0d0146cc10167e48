"""The digits job: real data, captions, loss, zero-shot accuracy."""

from __future__ import annotations

import torch
from torch import nn

from graphpipe.zoo.contrastive import contrastive_loss
from graphpipe.zoo.digits import HELD_OUT, NAMES, TEMPLATES, Tokenizer, digits, load_digits


def test_all_images_are_used_once() -> None:
    data = load_digits()
    images = torch.cat([data.train_images, data.test_images])
    assert images.shape == (1797, 1, 8, 8)
    assert len(data.test_images) == len(data.test_labels) == HELD_OUT
    assert images.min() == -1.0
    assert images.max() == 1.0
    train = {image.numpy().tobytes() for image in data.train_images}
    test = {image.numpy().tobytes() for image in data.test_images}
    assert len(train & test) == 0
    counts = torch.bincount(torch.cat([data.train_labels, data.test_labels]))
    # As scikit-learn's documentation counts them.
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_tokenizer_gives_every_word_an_id_and_pads() -> None:
    tokenizer = Tokenizer()
    ids = tokenizer.encode(["the digit two", "a scan of the number two"])
    assert ids.shape == (2, 6)
    assert ids[0, 3:].tolist() == [0, 0, 0]
    assert [tokenizer.words[i] for i in ids[1]] == ["a", "scan", "of", "the", "number", "two"]
    assert ids[0, 2] == ids[1, 5]


def test_captions_say_the_label() -> None:
    data = load_digits()
    batch = next(data.batches(32, 3))
    words = Tokenizer().words
    for ids, label in zip(batch.args[1], batch.targets, strict=True):
        caption = " ".join(words[i] for i in ids if i != 0)
        assert caption in [template.format(NAMES[label]) for template in TEMPLATES]


def test_epoch_drops_only_what_does_not_fill_a_mini_batch() -> None:
    batches = list(load_digits().batches(100, 0))
    assert len(batches) == 14
    assert all(batch.args[0].shape == (100, 1, 8, 8) for batch in batches)


def test_padding_does_not_change_a_caption() -> None:
    torch.manual_seed(0)
    model = digits().build_model()
    text = model.get_submodule("text")
    ids = Tokenizer().encode(["the digit two", "a scan of the number two"])
    with torch.no_grad():
        tokens = text.get_submodule("tokens")
        embedding = tokens.get_submodule("embedding")
        before = text(ids)[0]
        assert isinstance(embedding, nn.Embedding)
        embedding.weight[0] += 1.0
        torch.testing.assert_close(text(ids)[0], before)


def test_loss_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.5, 1.0], [0.0, 1.0, -1.0], [0.3, 0.2, 0.1]])
    plain = -0.5 * (logits.log_softmax(1).diag().mean() + logits.log_softmax(0).diag().mean())
    torch.testing.assert_close(contrastive_loss(logits), plain)
    torch.testing.assert_close(contrastive_loss(logits, torch.tensor([4, 5, 6])), plain)
    rows, columns = logits.softmax(1), logits.softmax(0)
    rights = [(0, (0, 2)), (1, (1,)), (2, (0, 2))]
    by_row = sum(-rows[i, list(js)].sum().log() for i, js in rights) / 3
    by_column = sum(-columns[list(js), i].sum().log() for i, js in rights) / 3
    torch.testing.assert_close(
        contrastive_loss(logits, torch.tensor([4, 5, 4])), 0.5 * (by_row + by_column)
    )


def test_loss_couples_the_samples() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 4)
    halves = (contrastive_loss(logits[:2, :2]) + contrastive_loss(logits[2:, 2:])) / 2
    assert (contrastive_loss(logits) - halves).abs() > 0.1


def test_zero_shot_accuracy_counts_right_captions() -> None:
    data = load_digits()

    class Oracle(nn.Module):
        """Knows the labels, and errs on the first 36."""

        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.zeros(1))

        def forward(self, images: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            scores = nn.functional.one_hot(data.test_labels, len(ids)).float()
            scores[:36] = -scores[:36]
            return scores

    assert abs(data.zero_shot_accuracy(Oracle()) - 0.9) < 1e-6
