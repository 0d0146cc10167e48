"""Opaque modules: a module that stays one op and runs as the Python that it is.

While the model is traced, the forward of an opaque module is replaced by one operator.
The shapes of its outputs are those that the user's function gives, or those that a copy of
the module with random weights returns for random inputs at two batch sizes. Afterwards the
operator becomes a ``call_module`` node that calls the real module.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphpipe.errors import CaptureError

OpaqueOption = Sequence[str | type[nn.Module]] | Mapping[str, Callable[..., object]]
"""Paths or classes of modules; or path -> a function of the module's arguments that returns
tensors of the right shape (it is called with meta tensors)."""

_SIZES = (2, 3)

OutputShape = tuple[tuple[tuple[int, int], ...], torch.dtype]
"""((samples' factor, constant) of each dimension, dtype)."""


@dataclass(frozen=True, eq=False)
class OpaqueSite:
    """One call of an opaque module.

    Attributes:
        path: Path of the module in the model.
        leaves: Leaves of (args, kwargs): a tensor's position among the tensors, or a constant
            wrapped in a 1-tuple.
        spec: Structure of (args, kwargs).
        outputs: Shapes and dtypes of the tensors that it returns.
        output_spec: Structure of what it returns.
    """

    path: str
    leaves: tuple[int | tuple[object], ...]
    spec: pytree.TreeSpec
    outputs: tuple[OutputShape, ...]
    output_spec: pytree.TreeSpec


_ACTIVE: list[list[OpaqueSite]] = []


@torch.library.custom_op("graphpipe::opaque", mutates_args=())
def opaque_op(tensors: list[torch.Tensor], site: int) -> list[torch.Tensor]:
    """Stands for the call of an opaque module while a model is traced; never runs."""
    raise AssertionError("an opaque call was not replaced by its module")


@opaque_op.register_fake
def _(tensors: list[torch.Tensor], site: int) -> list[torch.Tensor]:
    samples = _samples(tensors)
    return [
        tensors[0].new_empty([f * samples + c if f else c for f, c in dims], dtype=dtype)
        for dims, dtype in _ACTIVE[-1][site].outputs
    ]


def _samples(tensors: Sequence[torch.Tensor]) -> int | torch.SymInt:
    """The number of samples, as the symbol that the trace knows; 1 where there is none."""
    sizes: list[object] = [size for tensor in tensors for size in tensor.shape]
    for size in sizes:
        if isinstance(size, torch.SymInt):
            factor = _at(size, 1)
            return size // factor if factor > 1 else size
    return 1


def _at(size: object, samples: int) -> int:
    """A dimension (an int or a SymInt) for that many samples."""
    if isinstance(size, torch.SymInt):
        expression = size.node.expr
        return int(expression.subs(dict.fromkeys(expression.free_symbols, samples)))
    assert isinstance(size, int)
    return size


class OpaqueCalls:
    """The opaque modules of one capture and the calls of them that were seen.

    Raises:
        CaptureError: if a path or class does not occur in the model.
    """

    def __init__(self, model: nn.Module, option: OpaqueOption) -> None:
        self.sites: list[OpaqueSite] = []
        self._shapes: dict[str, Callable[..., object] | None] = {}
        functions = option if isinstance(option, Mapping) else {}
        modules = dict(model.named_modules())
        for item in option:
            if isinstance(item, str):
                if item not in modules or not item:
                    raise CaptureError(
                        "An opaque module does not exist",
                        where=repr(item),
                        expected="the path of a submodule, as in model.named_modules()",
                    )
                self._shapes[item] = functions.get(item)
            else:
                paths = [path for path, module in modules.items() if isinstance(module, item)]
                if not paths:
                    raise CaptureError(
                        "An opaque class has no instance in the model", where=item.__qualname__
                    )
                self._shapes.update(dict.fromkeys(paths))

    @contextlib.contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Replaces the forwards for the time of a trace."""
        if not self._shapes:
            yield
            return
        modules = dict(model.named_modules())
        _ACTIVE.append(self.sites)
        before: list[tuple[nn.Module, Callable[..., object] | None]] = []
        try:
            # All copies first: one opaque module may hold another.
            runs = {
                path: function or _twin(path, modules[path])
                for path, function in self._shapes.items()
            }
            for path, shapes in runs.items():
                module = modules[path]
                before.append((module, module.__dict__.get("forward")))
                real = self._shapes[path] is None
                module.forward = self._replacement(path, shapes, real=real)
            yield
        finally:
            for module, forward in before:
                if forward is None:
                    del module.forward
                else:
                    module.forward = forward
            _ACTIVE.pop()

    def _replacement(
        self, path: str, shapes: Callable[..., object], *, real: bool
    ) -> Callable[..., object]:
        def forward(*args: object, **kwargs: object) -> object:
            flat, spec = pytree.tree_flatten((args, kwargs))
            tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
            if not tensors:
                raise CaptureError("An opaque module needs a tensor argument", where=path)
            outputs, output_spec = _outputs(path, shapes, flat, spec, real)
            places = iter(range(len(tensors)))
            leaves = tuple(
                next(places) if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in flat
            )
            self.sites.append(OpaqueSite(path, leaves, spec, outputs, output_spec))
            values = opaque_op(tensors, len(self.sites) - 1)
            return pytree.tree_unflatten(list(values), output_spec)

        return forward


def _twin(path: str, module: nn.Module) -> Callable[..., object]:
    """A copy of the module whose parameters and buffers are random numbers on the CPU."""
    memo: dict[int, object] = {
        id(tensor): _random(tensor.shape, tensor.dtype, parameter=isinstance(tensor, nn.Parameter))
        for part in module.modules()
        for tensor in (*part._parameters.values(), *part._buffers.values(), *vars(part).values())
        if isinstance(tensor, torch.Tensor)
    }
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise _unknown(path, f"copying it failed: {error}") from error


def _unknown(path: str, why: str) -> CaptureError:
    return CaptureError(
        f"The shapes that an opaque module returns could not be found out by running a copy of "
        f"it on random numbers ({why})",
        where=path,
        fix=f"Give the shapes with opaque={{{path!r}: function}}, a function of the module's "
        "arguments that returns tensors of the right shapes, such as "
        "lambda x: x.new_empty(x.shape[0], 16)",
    )


def _random(shape: Sequence[int], dtype: torch.dtype, *, parameter: bool = False) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        value = torch.rand(shape, dtype=dtype) * 0.1
        return nn.Parameter(value) if parameter else value
    return torch.zeros(shape, dtype=dtype)


def _outputs(
    path: str,
    shapes: Callable[..., object],
    flat: Sequence[object],
    spec: pytree.TreeSpec,
    real: bool,
) -> tuple[tuple[OutputShape, ...], pytree.TreeSpec]:
    """What the module returns, as a function of the number of samples."""
    seen: list[tuple[list[torch.Tensor], pytree.TreeSpec]] = []
    for samples in _SIZES:
        leaves: list[object] = []
        for leaf in flat:
            if isinstance(leaf, torch.Tensor):
                shape = [_at(size, samples) for size in leaf.shape]
                fresh = torch.empty(shape, dtype=leaf.dtype, device="meta")
                leaves.append((shape, leaf.dtype) if real else fresh)
            else:
                leaves.append(leaf)
        results, structure = pytree.tree_flatten(_apart(path, shapes, leaves, spec, real))
        if not results or not all(isinstance(result, torch.Tensor) for result in results):
            raise CaptureError(
                "An opaque module must return tensors only", where=path, got=str(structure)
            )
        seen.append((results, structure))
    (small, structure), (large, _) = seen
    outputs: list[OutputShape] = []
    for a, b in zip(small, large, strict=True):
        dims = []
        for at_two, at_three in zip(a.shape, b.shape, strict=True):
            factor = at_three - at_two
            constant = at_two - _SIZES[0] * factor
            if constant and factor:
                raise CaptureError(
                    "An opaque module returns a shape that is not a multiple of the samples",
                    where=path,
                    got=f"{at_two} at 2 samples, {at_three} at 3",
                )
            dims.append((factor, constant))
        outputs.append((tuple(dims), a.dtype))
    return tuple(outputs), structure


def _apart(
    path: str,
    shapes: Callable[..., object],
    leaves: Sequence[object],
    spec: pytree.TreeSpec,
    real: bool,
) -> object:
    """Calls ``shapes`` in a thread of its own, which the trace does not see."""
    box: list[object] = []

    def work() -> None:
        try:
            with torch.no_grad():
                made = [
                    _random(*leaf) if real and isinstance(leaf, tuple) else leaf for leaf in leaves
                ]
                args, kwargs = pytree.tree_unflatten(made, spec)
                box.append(shapes(*args, **kwargs))
        except Exception as error:
            box.append(error)

    thread = threading.Thread(target=work, name=f"graphpipe-opaque-{path}")
    thread.start()
    thread.join()
    result = box[0]
    if isinstance(result, Exception):
        why = f"{type(result).__name__}: {result}"
        if real:
            raise _unknown(path, why) from result
        raise CaptureError(f"The function for an opaque module fails ({why})", where=path)
    return result
