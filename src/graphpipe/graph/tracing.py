"""Runs ``torch.export`` over model and loss, on stand-ins that cost no memory.

The model's parameters and buffers are replaced for the time of the capture by fake CPU
tensors of the same shape, whatever device they are on (``meta`` included): nothing is
computed, devices come out the same everywhere, and constants that the model makes with
``torch.tensor(...)`` keep their values even where the model itself has none.
"""

from __future__ import annotations

import contextlib
import enum
import linecache
import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
    ShapeEnv,
)
from torch.nn.modules import transformer
from torch.utils import _pytree as pytree

from graphpipe.errors import CaptureError
from graphpipe.graph.iteration import samples_as_one
from graphpipe.graph.opaque import OpaqueCalls
from graphpipe.graph.signature import Signature, accepts_targets
from graphpipe.graph.watch import (
    ModuleStack,
    refuse_autograd_functions,
    symbolic_len,
    user_frame,
)

MODEL_PREFIX = "model."
LOSS_PREFIX = "loss_fn."

LossFunction = Callable[..., object]


@dataclass(eq=False)
class Trace:
    """What came out of the export.

    Attributes:
        module: The exported graph: placeholders are the signature's tensors in order; the
            output is (loss addends..., output tensors...).
        loss_names: One entry per loss addend: its key where ``loss_fn`` returned a dict,
            ``sum`` and ``count`` where it returned that pair, else ``""``.
        output_leaves: Leaves of the model's output: a tensor's place among the output
            tensors, or ``("loss", None)``, or ``("constant", value)``.
        output_spec: Structure of the model's output.
        opaque: The calls of opaque modules, in the order of their sites.
        lost: Types of output leaves that are neither tensors nor plain constants.
    """

    module: fx.GraphModule
    loss_names: tuple[str, ...]
    output_leaves: tuple[tuple[str, object], ...]
    output_spec: pytree.TreeSpec
    opaque: OpaqueCalls
    lost: tuple[str, ...] = ()


@dataclass
class _Found:
    """What the wrapped model returned while it was traced."""

    shape_env: ShapeEnv | None = None
    loss_names: tuple[str, ...] = ()
    leaves: list[tuple[str, object]] = field(default_factory=list)
    spec: pytree.TreeSpec | None = None
    lost: list[str] = field(default_factory=list)


_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.SymInt,
)
"""Leaves of an output that can be the same for every call."""


class _Whole(nn.Module):
    """Model and loss as one module that takes and returns flat tensors."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        signature: Signature,
        training: bool,
        found: list[_Found],
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self._signature = signature
        self._expect_loss = training
        self._found = found

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        try:
            return self._traced(tensors)
        except Exception as error:
            raise _StoppedError from error

    def _traced(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = _Found(shape_env=_shape_env(tensors))
        self._found.append(found)
        args, kwargs, targets = self._signature.rebuild(tensors)
        output = self.model(*args, **kwargs)
        leaves, found.spec = pytree.tree_flatten(output)
        losses: list[torch.Tensor] = []
        own_loss: torch.Tensor | None = None
        if self.loss_fn is not None:
            if targets is None and not accepts_targets(self.loss_fn):
                result = self.loss_fn(output)
            else:
                result = self.loss_fn(output, targets)
            found.loss_names, losses = _loss_addends(result)
        else:
            own_loss = _loss_in(output)
            if own_loss is not None:
                found.loss_names, losses = ("",), [own_loss]
        values: list[torch.Tensor] = []
        for leaf in leaves:
            if leaf is own_loss and own_loss is not None:
                found.leaves.append(("loss", None))
            elif isinstance(leaf, torch.Tensor):
                found.leaves.append(("value", None))
                values.append(leaf)
            elif isinstance(leaf, _PLAIN):
                found.leaves.append(("constant", leaf))
            else:
                # An object of the trace (a key-value cache): its tensors are not in the graph.
                found.leaves.append(("constant", None))
                found.lost.append(type(leaf).__name__)
        return [*losses, *values]


class _StoppedError(Exception):
    """Carries an error of the model through the export, which prints what it hangs on errors."""

    @property
    def partial_fx_graph(self) -> object:
        raise AttributeError

    @partial_fx_graph.setter
    def partial_fx_graph(self, graph: object) -> None:
        """Nothing keeps the half-made graph: our message names the line instead."""


def _shape_env(tensors: Sequence[torch.Tensor]) -> ShapeEnv | None:
    """Where the export keeps what it learns about sizes."""
    sizes: list[object] = [size for tensor in tensors for size in tensor.shape]
    for size in sizes:
        if isinstance(size, torch.SymInt):
            environment: ShapeEnv = size.node.shape_env
            return environment
    return None


def _loss_addends(result: object) -> tuple[tuple[str, ...], list[torch.Tensor]]:
    """The scalars of a loss function's result, and what each is called."""
    if isinstance(result, Mapping):
        names, values = tuple(str(key) for key in result), list(result.values())
    elif isinstance(result, (tuple, list)) and len(result) == 2:
        names, values = ("sum", "count"), list(result)
    else:
        names, values = ("",), [result]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            got = (
                f"a tensor of shape ({', '.join(_size_text(size) for size in value.shape)})"
                if isinstance(value, torch.Tensor)
                else type(value).__name__
            )
            raise CaptureError(
                "The loss function does not return a loss",
                where=f"loss_fn{f', entry {name!r}' if name else ''}",
                expected="a scalar tensor, a pair (sum, count), or a dict of scalar addends",
                got=got,
                fix="Reduce the loss over the batch, for instance with .mean()",
            )
    return names, [value for value in values if isinstance(value, torch.Tensor)]


def _size_text(size: object) -> str:
    """``b`` for the batch."""
    return "b" if isinstance(size, torch.SymInt) else str(size)


def _loss_in(output: object) -> torch.Tensor | None:
    """The loss that a model returns by itself: its whole output, or the entry ``loss``."""
    value = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point():
        return value
    return None


def trace(
    model: nn.Module,
    signature: Signature,
    loss_fn: LossFunction | None,
    *,
    training: bool,
    opaque: OpaqueCalls,
) -> Trace:
    """Exports model and loss for any number of samples.

    Raises:
        CaptureError: if the model cannot be captured: control flow that depends on data, a
            custom ``autograd.Function``, a batch size that is taken for a constant, or an
            error of the model itself; it names the module, the line and the remedy.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(tracked_fakes=[]))
    batch = torch.export.Dim("batch", min=1)
    examples = [_stand_in(mode, leaf.value) for leaf in signature.tensors]
    shapes = tuple(
        {0: batch if leaf.rows == 1 else leaf.rows * batch} if leaf.rows else None
        for leaf in signature.tensors
    )
    found: list[_Found] = []
    whole = _Whole(model, loss_fn, signature, training, found)
    with (
        _CAPTURE_LOCK,
        _mode_of(whole, model, training),
        _stand_ins(whole, mode),
        _plain_transformers(),
        ModuleStack(whole) as stack,
        refuse_autograd_functions(stack),
        symbolic_len(stack),
        samples_as_one(stack),
        opaque.installed(model),
        _quiet(),
        torch.enable_grad(),
    ):
        try:
            exported = torch.export.export(
                whole, tuple(examples), strict=False, dynamic_shapes=(shapes,)
            )
        except Exception as stopped:
            error = stopped.__cause__ if isinstance(stopped, _StoppedError) else stopped
            if isinstance(error, CaptureError):
                raise error from None
            assert isinstance(error, Exception)
            raise _explained(error, stack, found) from error
        module = exported.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    last = found[-1]
    assert last.spec is not None
    return Trace(module, last.loss_names, tuple(last.leaves), last.spec, opaque, tuple(last.lost))


_CAPTURE_LOCK = threading.RLock()
"""Captures replace attributes of shared classes for a while: one at a time."""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from printing the graph of a failed export; our error says what matters."""
    names = ("torch.fx", "torch.fx.experimental.symbolic_shapes", "torch._dynamo", "torch.export",
             "torch._subclasses.fake_tensor")  # fmt: skip
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _stand_in(mode: FakeTensorMode, value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    with mode:
        return torch.empty(value.shape, dtype=value.dtype, device="cpu")


@contextlib.contextmanager
def _mode_of(whole: nn.Module, model: nn.Module, training: bool) -> Iterator[None]:
    """Puts the model into the wanted mode; leaves it alone where it is in it already.

    A model in training mode may hold modules in evaluation mode on purpose (a frozen tower
    without dropout): only a model whose own flag differs is switched.
    """
    before = {module: module.training for module in whole.modules()}
    try:
        if model.training != training:
            model.train(training)
        yield
    finally:
        for module, flag in before.items():
            module.training = flag


@contextlib.contextmanager
def _stand_ins(whole: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Replaces every parameter, buffer and tensor attribute by a fake one, ties kept."""
    made: dict[int, torch.Tensor] = {}
    undo: list[tuple[dict[str, object], str, object]] = []

    def fake(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in made:
            with mode:
                tensor = torch.empty_strided(
                    value.size(), value.stride(), dtype=value.dtype, device="cpu"
                )
                if isinstance(value, nn.Parameter):
                    tensor = nn.Parameter(tensor, requires_grad=value.requires_grad)
            made[id(value)] = tensor
        return made[id(value)]

    try:
        for module in whole.modules():
            for table in (module._parameters, module._buffers):
                for name, value in table.items():
                    if value is not None:
                        undo.append((table, name, value))  # type: ignore[arg-type]
                        table[name] = fake(value)  # type: ignore[assignment]
            attributes = module.__dict__
            for name, held in attributes.items():
                # A plain attribute on the CPU is a constant whose value the capture keeps.
                if isinstance(held, torch.Tensor) and held.device.type != "cpu":
                    undo.append((attributes, name, held))
                    attributes[name] = fake(held) if held.is_meta else held.detach().cpu()
        yield
    finally:
        for owner, name, original in undo:
            owner[name] = original


@contextlib.contextmanager
def _plain_transformers() -> Iterator[None]:
    """Keeps ``nn.Transformer`` and its parts from choosing a faster way by what they see.

    In evaluation mode an encoder layer would be fused into one op. A mask would be compared
    with a causal one, which has no answer while a model is captured; without it, the mask
    itself is applied, to the same effect.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    detect = transformer._detect_is_causal_mask
    torch.backends.mha.set_fastpath_enabled(False)
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
        transformer._detect_is_causal_mask = detect


def _explained(error: Exception, stack: ModuleStack, found: Sequence[_Found]) -> CaptureError:
    """The error of an export in the words of the user's model."""
    cause = _root(error)
    place = _place(cause.__traceback__ or error.__traceback__, stack)
    module = stack.where
    opaque = (
        f"capture with opaque=[{module!r}], so that the module stays one op and runs as it is"
        if module
        else "move this code into a submodule and capture with opaque=[its path]"
    )
    if isinstance(cause, GuardOnDataDependentSymNode):
        return CaptureError(
            "The model's control flow depends on the values of a tensor",
            where=place,
            expected="the same operators for every batch",
            got="a Python branch, loop or shape that depends on data",
            fix=f"Rewrite it with torch.where, or {opaque}",
        )
    text = str(error)
    if isinstance(cause, ConstraintViolationError) or "Constraints violated" in text:
        line = _specialising_line(found)
        return CaptureError(
            "The model works only for batches of some sizes, so stages cannot choose their "
            "micro-batch size",
            where=line or place,
            expected="code that works for every number of samples",
            got=_first_reason(text),
            fix="Take the batch size from x.shape[0] where it is used, do not loop over it or "
            f"convert it to a Python number; or {opaque}",
        )
    return CaptureError(
        f"The model fails while it is captured: {type(cause).__name__}: {_short(str(cause))}",
        where=place,
        fix=f"If it runs eagerly with these inputs, {opaque}",
    )


def _root(error: BaseException) -> BaseException:
    """The first of a chain of errors that says something of its own."""
    seen: set[int] = set()
    current = error
    while id(current) not in seen:
        seen.add(id(current))
        following = current.__cause__ or current.__context__
        if following is None:
            break
        current = following
    return current


def _place(trace: TracebackType | None, stack: ModuleStack) -> str:
    """``module 'tower.router', model.py:27: if x.mean() > 0:``."""
    parts = []
    if stack.where is not None:
        parts.append(f"module {stack.where!r}" if stack.where else "the model itself")
    frame = user_frame(trace)
    if frame is not None:
        file, line = frame
        code = linecache.getline(file, line).strip()
        parts.append(f"{file}:{line}" + (f": {code}" if code else ""))
    return ", ".join(parts) or "the model"


def _specialising_line(found: Sequence[_Found]) -> str | None:
    """The line that fixed the batch size, where the export has noted it."""
    for item in found:
        places = item.shape_env.replacements_slocs if item.shape_env is not None else {}
        for place in places.values():
            if place.maybe_user_loc is not None:
                return str(place.maybe_user_loc)
            frame = place.framework_loc
            if isinstance(frame, traceback.FrameSummary):
                code = linecache.getline(frame.filename, frame.lineno or 0).strip()
                return f"{frame.filename}:{frame.lineno}: {code}"
    return None


def _first_reason(text: str) -> str:
    for line in text.splitlines():
        if line.strip().startswith("- "):
            return _short(line.strip()[2:])
    return _short(text)


def _short(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def names_of(model: nn.Module, loss_fn: Sequence[object] | object) -> dict[str, str]:
    """Name in the exported module -> canonical name, for parameters and buffers."""
    names: dict[str, str] = {}
    canonical: dict[int, str] = {}
    for source, prefix in ((model, MODEL_PREFIX), (loss_fn, LOSS_PREFIX)):
        if not isinstance(source, nn.Module):
            continue
        shown = "" if prefix == MODEL_PREFIX else LOSS_PREFIX
        tensors = [
            *source.named_parameters(remove_duplicate=False),
            *source.named_buffers(remove_duplicate=False),
        ]
        for name, tensor in tensors:
            first = canonical.setdefault(id(tensor), shown + name)
            names[prefix + name] = first
    return names
