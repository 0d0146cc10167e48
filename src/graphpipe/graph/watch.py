"""Watches a model while it is traced: which module runs, and what must not be traced over."""

from __future__ import annotations

import builtins
import contextlib
import os
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.autograd.function import Function, _SingleLevelFunction
from torch.utils.checkpoint import CheckpointFunction

from graphpipe.errors import CaptureError

_LIBRARY = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


class ModuleStack:
    """The path of the module whose forward is running, also after it has failed."""

    def __init__(self, whole: nn.Module) -> None:
        self._paths: dict[int, str] = {id(m): name for name, m in whole.named_modules()}
        self._stack: list[int] = []
        self._hooks: list[Any] = []
        self._thread = threading.get_ident()

    @property
    def where(self) -> str | None:
        """Path of the innermost running module, ``""`` for the model; None outside of it."""
        for key in reversed(self._stack):
            path = self._paths.get(key)
            if path is not None and path.split(".")[0] == "model":
                return path.removeprefix("model").removeprefix(".")
        return None

    def __enter__(self) -> Self:
        register = nn.modules.module
        self._hooks = [
            register.register_module_forward_pre_hook(self._enter),
            register.register_module_forward_hook(self._leave),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def watching(self) -> bool:
        """Whether this thread is the one that traces the model."""
        return threading.get_ident() == self._thread

    def _enter(self, module: nn.Module, _args: object) -> None:
        if self.watching:
            self._stack.append(id(module))

    def _leave(self, module: nn.Module, _args: object, _output: object) -> None:
        while self.watching and self._stack and self._stack.pop() != id(module):
            pass


def user_frame(trace: TracebackType | None) -> tuple[str, int] | None:
    """File and line of the innermost frame that is neither torch's nor ours."""
    found: tuple[str, int] | None = None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_user_file(file):
            found = (file, trace.tb_lineno)
        trace = trace.tb_next
    return found


def is_user_file(file: str) -> bool:
    """Whether a file belongs to the user's code (or to a library that is not torch)."""
    return not file.startswith((_LIBRARY, _OURS, "<"))


@contextlib.contextmanager
def refuse_autograd_functions(stack: ModuleStack) -> Iterator[None]:
    """Refuses a custom ``autograd.Function``: an export records its forward alone.

    Its backward would be lost without a word. Activation checkpointing, which is one, is
    replaced by a plain call of what it wraps.

    Raises:
        CaptureError: from within the traced code, naming the function and its module.
    """
    # The attribute of the base class is replaced, so that `swish = Swish.apply`, bound
    # when the user's module was imported, is seen as well.
    base: Any = _SingleLevelFunction

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> object:
        # The autograd of a torch.library.custom_op is such a function too: that op is kept.
        if not stack.watching or cls.forward.__module__ == "torch._library.autograd":
            return super(base, cls).apply(*args, **kwargs)
        if issubclass(cls, CheckpointFunction):
            run, _preserve_rng_state, *rest = args
            result: object = run(*rest)
            return result
        raise CaptureError(
            f"The model uses the custom autograd.Function {cls.__qualname__}, whose backward "
            "a capture cannot see",
            where=f"module {stack.where!r}" if stack.where else "the model itself",
            fix="Register it with torch.library.custom_op and register_autograd, which keeps "
            "it as one op" + (f", or capture with opaque=[{stack.where!r}]" if stack.where else ""),
        )

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        del base.apply


@contextlib.contextmanager
def symbolic_len(stack: ModuleStack) -> Iterator[None]:
    """Lets ``len(x)`` of a traced tensor be its batch size, as ``x.shape[0]`` is.

    Contrastive losses label the pairs with ``torch.arange(len(logits))``, and Python turns
    what ``__len__`` returns into a plain integer: the batch of the example would be baked in.
    """
    original = builtins.len

    def length(value: Any, /) -> Any:
        if isinstance(value, torch.Tensor) and stack.watching and value.dim():
            size: object = value.shape[0]
            if isinstance(size, torch.SymInt):
                return size
        return original(value)

    own: Any = torch.Tensor.__len__

    def no_hint(self: torch.Tensor) -> int:
        size: object = self.shape[0] if self.dim() else None
        if stack.watching and isinstance(size, torch.SymInt):
            # list(x) asks for a hint how long it will be, and takes this for "unknown".
            raise TypeError("the number of samples is open while a model is captured")
        return int(own(self))

    builtins.len = length
    torch.Tensor.__len__ = no_hint  # type: ignore[method-assign]
    try:
        yield
    finally:
        builtins.len = original
        torch.Tensor.__len__ = own  # type: ignore[method-assign]
