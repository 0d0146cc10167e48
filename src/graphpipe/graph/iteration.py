"""Loops over the samples of a batch, as far as a graph for any batch can hold them.

``torch.cat(list(x))`` turns (samples, rows, ...) into (samples * rows, ...): vision-language
models gather the features of their images so. Iterating over the batch itself would fix its
size, so while a model is traced the iterator gives one stand-in for all samples, which must
end in such a concatenation. Any other use is refused by name.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphpipe.errors import CaptureError
from graphpipe.graph.watch import ModuleStack, is_user_file


@torch.library.custom_op("graphpipe::every_sample", mutates_args=())
def every_sample(x: torch.Tensor) -> torch.Tensor:
    """Stands for all the samples of ``x``, one after the other; never runs."""
    raise AssertionError("a loop over samples was not replaced")


@every_sample.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty([x.shape[0] * x.shape[1], *x.shape[2:]])


@contextlib.contextmanager
def samples_as_one(stack: ModuleStack) -> Iterator[None]:
    """Lets ``for sample in x`` give one stand-in where ``x`` is a batch of any size.

    Raises:
        CaptureError: from within the traced code, where the stand-in could not be used.
    """
    original: Any = torch.Tensor.__iter__

    def iterate(self: torch.Tensor) -> Any:
        size: object = self.shape[0] if self.dim() else None
        if not stack.watching or not isinstance(size, torch.SymInt):
            return original(self)
        if self.dim() < 2:
            raise refused(stack.where, _place())
        return iter((every_sample(self),))

    torch.Tensor.__iter__ = iterate  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.__iter__ = original  # type: ignore[method-assign]


def refused(module: str | None, place: str) -> CaptureError:
    """The error for a loop over samples that a graph cannot hold."""
    return CaptureError(
        "The model loops over the samples of a batch, whose number must stay open",
        where=", ".join(filter(None, [f"module {module!r}" if module else "", place])),
        expected="operations on the whole batch (or torch.cat(list(x)), which is understood)",
        fix="Work on the whole batch at once"
        + (f", or capture with opaque=[{module!r}]" if module else ""),
    )


def is_concatenation(user: fx.Node, stand_in: fx.Node) -> bool:
    """Whether ``user`` is what may be done with a stand-in: cat([it], 0), or returning it."""
    if user.op == "output":
        return True
    if user.target is not torch.ops.aten.cat.default or len(user.args) == 0:
        return False
    dim = user.args[1] if len(user.args) > 1 else 0
    operands: Any = user.args[0]
    return bool(list(operands) == [stand_in] and dim == 0)


def _place() -> str:
    """File and line of the loop."""
    frame = sys._getframe(2)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
