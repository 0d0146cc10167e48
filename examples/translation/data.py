"""English and other languages, side by side: the message catalogues that Django ships.

The catalogues are read where Django is installed (its licence is BSD-3-Clause); nothing of them
is copied. Text is cut into characters: the catalogues are too small for more.
"""

from __future__ import annotations

import gettext
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

LENGTH = 40
"""Characters of a message, with the language before it or the end after it; longer ones are
left out."""
PADDING, END, START = 0, 1, 2


@dataclass(frozen=True)
class Alphabet:
    """Characters and names of languages to ids."""

    symbols: tuple[str, ...]

    def encode(self, symbols: Sequence[str], start: int | None, end: int | None) -> list[int]:
        """Ids of ``symbols``, padded to :data:`LENGTH`."""
        ids = [self.symbols.index(symbol) + 3 for symbol in symbols]
        ids = ([] if start is None else [start]) + ids + ([] if end is None else [end])
        return ids + [PADDING] * (LENGTH - len(ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text up to its end."""
        text = ""
        for i in ids:
            if i < 3:
                break
            text += self.symbols[i - 3]
        return text

    def __len__(self) -> int:
        return len(self.symbols) + 3


def messages(language: str) -> dict[str, str]:
    """Short messages of all of Django's catalogues of a language, by their English text."""
    found: dict[str, str] = {}
    root = Path(str(files("django")))
    for path in sorted(root.rglob(f"locale/{language}/LC_MESSAGES/django.mo")):
        with path.open("rb") as file:
            catalogue = gettext.GNUTranslations(file)
        texts = {key if isinstance(key, str) else key[0] for key in catalogue._catalog}
        for english in texts:
            other = catalogue.gettext(english)
            if english and "\n" not in english + other and other != english:
                found[english] = other
    return {e: o for e, o in found.items() if max(len(e), len(o)) < LENGTH - 1}


def load(languages: Sequence[str]) -> tuple[TensorDataset, TensorDataset, Alphabet]:
    """Pairs to train on, pairs held out, and the alphabet.

    A sample is (source [LENGTH], decoder's input [LENGTH], its targets [LENGTH]), int64. The
    source begins with the name of the language to translate to. An English message is
    held out in all languages or in none.
    """
    triples = [
        (language, english, other)
        for language in languages
        for english, other in sorted(messages(language).items())
    ]
    letters = sorted({letter for _, *texts in triples for text in texts for letter in text})
    alphabet = Alphabet((*languages, *letters))
    originals = sorted({english for _, english, _ in triples})
    order = torch.randperm(len(originals), generator=torch.Generator().manual_seed(0))
    apart = {originals[i] for i in order[: len(originals) // 10].tolist()}

    def tensors(held_out: bool) -> TensorDataset:
        chosen = [triple for triple in triples if (triple[1] in apart) == held_out]
        rows = [
            (
                alphabet.encode([language, *english], None, None),
                alphabet.encode([*other], START, None),
                alphabet.encode([*other], None, END),
            )
            for language, english, other in chosen
        ]
        fields: list[Tensor] = [torch.tensor(field) for field in zip(*rows, strict=True)]
        return TensorDataset(*fields)

    return tensors(False), tensors(True), alphabet
