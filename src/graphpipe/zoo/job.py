"""``Job``: a model with its example inputs, loss and data, as a factory returns it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

NamedParameters: TypeAlias = Iterable[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Batch:
    """One mini-batch: what a step is given."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    targets: Any = None


@dataclass(frozen=True)
class Job:
    """Everything that planning and training need of a model.

    Attributes:
        model: The module, or a function without arguments that builds it. A function lets
            the model be built on the meta device, where it takes no memory.
        args: Example positional inputs: tensors with the batch as dimension 0, at least
            2 samples.
        kwargs: Example keyword inputs.
        targets: Example targets, the second argument of ``loss_fn``; None where
            ``loss_fn`` takes the output alone.
        loss_fn: The loss, a scalar, of (output, targets); None where the model returns it.
        data: Gives the mini-batches of an epoch, each a :class:`Batch`:
            ``data(batch_size, epoch)``, the same ones in every process. None where the job has
            no data of its own.
        optimizer: Makes the optimizer from (name, parameter) pairs; None leaves the choice
            to the caller.
        batch_size: B that the job is usually trained with, samples.
        name: For plans and messages.
        capture_options: Further arguments of :func:`~graphpipe.graph.capture.capture`.
    """

    model: nn.Module | Callable[[], nn.Module]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    targets: Any = None
    loss_fn: Callable[..., torch.Tensor] | None = None
    data: Callable[[int, int], Iterable[Batch]] | None = None
    optimizer: Callable[[NamedParameters], torch.optim.Optimizer] | None = None
    batch_size: int | None = None
    name: str = ""
    capture_options: Mapping[str, Any] = field(default_factory=dict)

    def build_model(self) -> nn.Module:
        """The module with its values."""
        return self.model if isinstance(self.model, nn.Module) else self.model()

    def on_meta(self) -> Job:
        """The same job with model and examples on the meta device: shapes without values.

        A model that was given as a function is never built with values. One that was given
        as a module stays as it is, and so do the examples.
        """
        if isinstance(self.model, nn.Module):
            return self
        with torch.device("meta"):
            model = self.model()
        args, kwargs, targets = pytree.tree_map_only(
            torch.Tensor,
            lambda value: value.to("meta"),
            (self.args, dict(self.kwargs), self.targets),
        )
        return replace(self, model=model, args=args, kwargs=kwargs, targets=targets)
