"""Convolutional models: a residual network, a U-Net, and an Inception network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpipe.zoo.job import Batch, Job
from graphpipe.zoo.synthetic import synthetic_job


class ConvNorm(nn.Sequential):
    """Convolution without bias, batch normalisation and, unless told otherwise, ReLU."""

    def __init__(
        self,
        given: int,
        wanted: int,
        kernel: int | tuple[int, int] = 3,
        *,
        stride: int = 1,
        activation: bool = True,
    ) -> None:
        size = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (size[0] // 2, size[1] // 2)
        layers: list[nn.Module] = [
            nn.Conv2d(given, wanted, size, stride=stride, padding=padding, bias=False),
            nn.BatchNorm2d(wanted),
        ]
        if activation:
            layers.append(nn.ReLU())
        super().__init__(*layers)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut (He et al., 2016)."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        wanted = 4 * width
        self.body = nn.Sequential(
            ConvNorm(given, width, 1),
            ConvNorm(width, width, 3, stride=stride),
            ConvNorm(width, wanted, 1, activation=False),
        )
        self.shortcut = (
            nn.Identity()
            if stride == 1 and given == wanted
            else ConvNorm(given, wanted, 1, stride=stride, activation=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, four groups of bottlenecks, pooling and a classifier."""

    def __init__(self, blocks: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvNorm(3, width, 7, stride=2), nn.MaxPool2d(3, 2, 1))
        groups: list[nn.Module] = []
        given = width
        for level, count in enumerate(blocks):
            for i in range(count):
                stride = 2 if level > 0 and i == 0 else 1
                groups.append(Bottleneck(given, width << level, stride))
                given = 4 * (width << level)
        self.groups = nn.Sequential(*groups)
        self.head = nn.Linear(given, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes] from images [b, 3, size, size]."""
        out: Tensor = self.head(self.groups(self.stem(images)).mean((2, 3)))
        return out


class UNet(nn.Module):
    """Downwards, upwards, and a skip over every level in between (Ronneberger et al., 2015).

    Group normalisation, so that a sample's result does not depend on the others.
    """

    def __init__(self, channels: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [channels << level for level in range(levels)]
        self.down = nn.ModuleList(
            self._double(given, wanted)
            for given, wanted in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.bottom = self._double(widths[-1], 2 * widths[-1])
        self.widen = nn.ModuleList(
            nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in reversed(widths)
        )
        self.up = nn.ModuleList(self._double(2 * width, width) for width in reversed(widths))
        self.head = nn.Conv2d(channels, classes, 1)

    @staticmethod
    def _double(given: int, wanted: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for size in (given, wanted):
            layers += [nn.Conv2d(size, wanted, 3, padding=1), nn.GroupNorm(4, wanted), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes, size, size] from images [b, 3, size, size]."""
        skips: list[Tensor] = []
        x = images
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for widen, block, skip in zip(self.widen, self.up, reversed(skips), strict=True):
            x = block(torch.cat([skip, widen(x)], dim=1))
        out: Tensor = self.head(x)
        return out


class InceptionBlock(nn.Module):
    """Four branches over the same input, concatenated (Szegedy et al., 2016)."""

    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        self.single = ConvNorm(given, width, 1)
        self.convolved = nn.Sequential(ConvNorm(given, width, 1), ConvNorm(width, width, 3))
        self.factored = nn.Sequential(
            ConvNorm(given, width, 1),
            ConvNorm(width, width, (1, 7)),
            ConvNorm(width, width, (7, 1)),
        )
        self.pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvNorm(given, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(
            [self.single(x), self.convolved(x), self.factored(x), self.pooled(x)], dim=1
        )


class Inception(nn.Module):
    """A stem, ``blocks`` Inception blocks with a halving in the middle, and a classifier."""

    def __init__(self, width: int, blocks: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            ConvNorm(3, width, 3, stride=2),
            ConvNorm(width, 2 * width, 3, stride=2),
            ConvNorm(2 * width, 4 * width, 3, stride=2),
        )
        body: list[nn.Module] = []
        for i in range(blocks):
            if i == blocks // 2:
                body.append(nn.MaxPool2d(3, 2, 1))
            body.append(InceptionBlock(4 * width, width))
        self.body = nn.Sequential(*body)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes] from images [b, 3, size, size]."""
        out: Tensor = self.head(self.body(self.stem(images)).mean((2, 3)))
        return out


def _image_job(
    name: str,
    model: Callable[[], nn.Module],
    *,
    size: int,
    classes: int,
    batch_size: int,
    per_pixel: bool = False,
) -> Job:
    """Random images; the target is a class per image or per pixel."""

    def draw(samples: int, generator: torch.Generator) -> Batch:
        images = torch.randn(samples, 3, size, size, generator=generator)
        shape = (samples, size, size) if per_pixel else (samples,)
        return Batch((images,), {}, torch.randint(classes, shape, generator=generator))

    return synthetic_job(name, model, draw, F.cross_entropy, batch_size=batch_size)


def resnet(
    *,
    blocks: Sequence[int] = (3, 4, 6, 3),
    width: int = 64,
    size: int = 224,
    classes: int = 1000,
    batch_size: int = 256,
    name: str = "resnet",
) -> Job:
    """The job: image classification; the default is ResNet-50."""
    model = partial(ResNet, tuple(blocks), width, classes)
    return _image_job(name, model, size=size, classes=classes, batch_size=batch_size)


def unet(
    *,
    channels: int = 64,
    levels: int = 4,
    size: int = 256,
    classes: int = 21,
    batch_size: int = 64,
    name: str = "unet",
) -> Job:
    """The job: a class for every pixel."""
    model = partial(UNet, channels, levels, classes)
    return _image_job(
        name, model, size=size, classes=classes, batch_size=batch_size, per_pixel=True
    )


def inception(
    *,
    width: int = 192,
    blocks: int = 8,
    size: int = 299,
    classes: int = 1000,
    batch_size: int = 256,
    name: str = "inception",
) -> Job:
    """The job: image classification with four branches in every block."""
    model = partial(Inception, width, blocks, classes)
    return _image_job(name, model, size=size, classes=classes, batch_size=batch_size)
