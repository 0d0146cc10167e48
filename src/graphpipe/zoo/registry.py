"""The models of the zoo by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from graphpipe.zoo.candle_uno import candle_uno
from graphpipe.zoo.clip import clip
from graphpipe.zoo.convolutional import inception, resnet, unet
from graphpipe.zoo.digits import digits
from graphpipe.zoo.dlrm import dlrm
from graphpipe.zoo.gpt2 import gpt2
from graphpipe.zoo.job import Job
from graphpipe.zoo.llava import llava
from graphpipe.zoo.mmt import mmt
from graphpipe.zoo.t5 import t5


@dataclass(frozen=True)
class Entry:
    """A model that can be named ``zoo:NAME``.

    Attributes:
        make: Builds the job without building the model.
        summary: One line for listings.
    """

    make: Callable[[], Job]
    summary: str


def _entry(factory: Callable[..., Job], name: str, summary: str, **sizes: object) -> Entry:
    return Entry(partial(factory, name=name, **sizes), summary)


ZOO: dict[str, Entry] = {
    "digits": Entry(digits, "image and caption towers on scikit-learn's handwritten digits"),
    "mmt": _entry(mmt, "mmt", "multi-modal transformer, 4 encoders of 8 layers, 407M parameters"),
    "mmt-tiny": _entry(
        mmt,
        "mmt-tiny",
        "the same with encoders of 4, 2, 2 and 1 layers of width 32",
        depths=(4, 2, 2, 1),
        width=32,
        heads=2,
        sequence=8,
        joint_layers=1,
        classes=5,
        batch_size=32,
    ),
    "dlrm": _entry(dlrm, "dlrm", "recommendation, 24 tables of a million rows, 6.7 GB"),
    "dlrm-tiny": _entry(
        dlrm,
        "dlrm-tiny",
        "the same with 24 tables of 50 rows",
        rows=50,
        features=8,
        bag=5,
        dense=16,
        width=32,
        bottom_layers=3,
        top_layers=2,
        batch_size=64,
    ),
    "candle-uno": _entry(
        candle_uno, "candle-uno", "drug response, 5 towers of 8 layers of width 4192"
    ),
    "candle-uno-tiny": _entry(
        candle_uno,
        "candle-uno-tiny",
        "the same with layers of width 24",
        inputs=(1, 1, 9, 52, 20, 52, 20),
        width=24,
        batch_size=64,
    ),
    "gpt2": _entry(gpt2, "gpt2", "language model, 124M parameters, tied head"),
    "gpt2-tiny": _entry(
        gpt2,
        "gpt2-tiny",
        "the same with 4 layers of width 32",
        vocabulary=101,
        length=16,
        width=32,
        heads=2,
        layers=4,
        batch_size=32,
    ),
    "t5": _entry(t5, "t5", "encoder-decoder language model of T5-small's size"),
    "t5-tiny": _entry(
        t5,
        "t5-tiny",
        "the same with 2 + 2 layers of width 32",
        vocabulary=101,
        source_length=12,
        target_length=8,
        width=32,
        heads=2,
        layers=2,
        batch_size=32,
    ),
    "clip": _entry(clip, "clip", "image and text towers of CLIP ViT-B/16's size"),
    "clip-tiny": _entry(
        clip,
        "clip-tiny",
        "the same with towers of 3 and 2 layers",
        image=(16, 4, 32, 2, 3),
        text=(101, 8, 24, 2, 2),
        shared=16,
        batch_size=32,
    ),
    "llava": _entry(llava, "llava", "frozen ViT-L, projector and 7B decoder, 1 image a sample"),
    "llava-trained": _entry(
        llava, "llava-trained", "the same with the image tower trained", frozen=False
    ),
    "llava-8": _entry(llava, "llava-8", "the same, frozen, with 8 images a sample", images=8),
    "llava-tiny": _entry(
        llava,
        "llava-tiny",
        "the same, frozen, with 3 + 3 layers and 2 images a sample",
        image=(16, 4, 24, 2, 3),
        decoder=(101, 32, 2, 48, 3),
        images=2,
        image_tokens=4,
        text=8,
        batch_size=32,
    ),
    "resnet": _entry(resnet, "resnet", "ResNet-50"),
    "resnet-tiny": _entry(
        resnet,
        "resnet-tiny",
        "the same with 4 blocks on images of 32 pixels a side",
        blocks=(1, 1, 1, 1),
        width=8,
        size=32,
        classes=10,
        batch_size=32,
    ),
    "unet": _entry(unet, "unet", "U-Net with four levels"),
    "unet-tiny": _entry(
        unet,
        "unet-tiny",
        "the same with two levels on images of 16 pixels a side",
        channels=8,
        levels=2,
        size=16,
        classes=3,
        batch_size=32,
    ),
    "inception": _entry(inception, "inception", "eight blocks of four branches"),
    "inception-tiny": _entry(
        inception,
        "inception-tiny",
        "the same with two blocks on images of 32 pixels a side",
        width=8,
        blocks=2,
        size=32,
        classes=10,
        batch_size=32,
    ),
}
