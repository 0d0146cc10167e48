"""The inputs of a model as a flat list of leaves: which are per-sample, which are constants.

``(args, kwargs, targets)`` is flattened once, here, for capture and for the runtime alike.
A leaf that is not a tensor (None, a flag, a number, a string) is a constant of the capture.
A tensor is per-sample, cut along dimension 0, or it was marked and is replicated.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphpipe.errors import CaptureError, InputError
from graphpipe.graph.model_graph import ModelGraph, TensorSpec
from graphpipe.graph.program import Program

_ROOTS = ("args", "kwargs", "targets")


@dataclass(frozen=True)
class Leaf:
    """One leaf of ``(args, kwargs, targets)``.

    Attributes:
        path: Its place, such as ``args[0]``, ``kwargs['mask']`` or ``targets``.
        name: A Python identifier for it, the parameter's name where there is one.
        value: The example.
        rows: Rows per sample of a per-sample tensor (usually 1); 0 for anything else.
    """

    path: str
    name: str
    value: object
    rows: int = 0

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, torch.Tensor)


@dataclass(frozen=True, eq=False)
class Signature:
    """All leaves, their structure, and the number of samples of the examples."""

    leaves: tuple[Leaf, ...]
    spec: pytree.TreeSpec
    batch: int

    @property
    def tensors(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.is_tensor)

    @property
    def constants(self) -> dict[str, object]:
        """The leaves that are not tensors, by path."""
        return {leaf.path: leaf.value for leaf in self.leaves if not leaf.is_tensor}

    def rebuild(
        self, tensors: Sequence[object]
    ) -> tuple[tuple[object, ...], dict[str, object], object]:
        """``(args, kwargs, targets)`` with these in the place of the tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if leaf.is_tensor else leaf.value for leaf in self.leaves]
        args, kwargs, targets = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs, targets


def read_signature(
    model: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    targets: object,
    *,
    not_per_sample: Iterable[str] = (),
    rows_per_sample: Mapping[str, int] | None = None,
) -> Signature:
    """Flattens the examples and finds out which tensors are per-sample.

    Every tensor with a dimension is per-sample unless its path, its name or a path that
    contains it is in ``not_per_sample``. ``rows_per_sample`` gives the inputs that have
    several rows for each sample, such as ``{"images": 8}``.

    Raises:
        CaptureError: naming the inputs whose first dimension is not the batch, or that the
            options name but the model does not have.
    """
    leaves, spec = pytree.tree_flatten_with_path((tuple(args), dict(kwargs), targets))
    names = _positional_names(model, len(args))
    found: list[Leaf] = []
    for key_path, value in leaves:
        path = _path(key_path)
        found.append(Leaf(path, _identifier(path, names), value))
    whole = dict.fromkeys(not_per_sample)
    rows = dict(rows_per_sample or {})
    _all_exist([*whole, *rows], found, names)
    marked = [leaf for leaf in found if any(_within(leaf, mark, names) for mark in whole)]
    marked_paths = {leaf.path for leaf in marked}
    candidates: list[tuple[Leaf, int]] = []
    for leaf in found:
        cut = isinstance(leaf.value, torch.Tensor) and leaf.value.dim() > 0
        if cut and leaf.path not in marked_paths:
            times = [count for mark, count in rows.items() if _within(leaf, mark, names)]
            candidates.append((leaf, times[0] if times else 1))
    batch = _batch_of(candidates)
    per_sample = {leaf.path: times for leaf, times in candidates}
    return Signature(
        tuple(
            Leaf(leaf.path, leaf.name, leaf.value, per_sample.get(leaf.path, 0)) for leaf in found
        ),
        spec,
        batch,
    )


def _path(key_path: pytree.KeyPath) -> str:
    """``args[0]`` for the first leaf of ``(args, kwargs, targets)``."""
    root = key_path[0]
    assert isinstance(root, pytree.SequenceKey)
    return _ROOTS[root.idx] + pytree.keystr(key_path[1:])


def _batch_of(candidates: list[tuple[Leaf, int]]) -> int:
    """The number of samples in the examples, which all candidates must agree on."""
    if not candidates:
        raise CaptureError(
            "No input has a batch dimension, so there is nothing to cut into micro-batches",
            expected="at least one tensor whose first dimension counts the samples",
            fix="Pass the examples as tensors with the batch as their first dimension",
        )
    sizes: list[tuple[Leaf, int, int]] = []
    for leaf, times in candidates:
        assert isinstance(leaf.value, torch.Tensor)
        sizes.append((leaf, int(leaf.value.shape[0]), times))
    votes = Counter(size // times for _, size, times in sizes if times and size % times == 0)
    if not votes:
        raise CaptureError(
            "The rows of no input are the multiple of the batch that rows_per_sample says",
            got=", ".join(f"{leaf.path} with {size} rows" for leaf, size, _ in sizes),
        )
    batch = votes.most_common(1)[0][0]
    odd = [(leaf, size, times) for leaf, size, times in sizes if size != times * batch]
    if odd:
        listing = ", ".join(
            f"{leaf.path} ({leaf.name}) with shape {tuple(_shape(leaf))}" for leaf, _, _ in odd
        )
        raise CaptureError(
            "An input's first dimension is not the batch",
            where=", ".join(leaf.path for leaf, _, _ in odd),
            expected=f"{batch} samples in dimension 0, as in the other inputs",
            got=listing,
            fix="If it belongs to no sample, mark it with not_per_sample="
            f"[{', '.join(repr(leaf.path) for leaf, _, _ in odd)}]; if it has several rows for "
            "each sample, say how many with rows_per_sample; if the batch is another "
            "dimension, transpose it before it enters the model",
        )
    if batch < 2:
        raise CaptureError(
            "The examples hold too few samples",
            where=candidates[0][0].path,
            expected="at least 2 samples, so that the batch is not taken for a constant 1",
            got=batch,
            fix="Capture with a batch of 2 or more; it then serves every micro-batch size",
        )
    return batch


def _shape(leaf: Leaf) -> Sequence[int]:
    assert isinstance(leaf.value, torch.Tensor)
    return leaf.value.shape


def _positional_names(model: nn.Module, count: int) -> dict[int, str]:
    """Names of the first ``count`` positional parameters of ``model.forward``."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return {}
    names: dict[int, str] = {}
    for i in range(count):
        if i < len(parameters) and parameters[i].kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            names[i] = parameters[i].name
        else:
            rest = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL]
            if rest:
                first = parameters.index(
                    next(p for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL)
                )
                names[i] = f"{rest[0]}_{i - first}"
    return names


def _identifier(path: str, names: Mapping[int, str]) -> str:
    """``args[0]['ids']`` of ``forward(self, batch)`` becomes ``batch_ids``."""
    parts = re.findall(r"\w+", path)
    if parts[0] == "args" and len(parts) > 1 and int(parts[1]) in names:
        parts = [names[int(parts[1])], *parts[2:]]
    elif parts[0] == "kwargs" and len(parts) > 1:
        parts = parts[1:]
    name = "_".join(parts)
    return name if name.isidentifier() else f"input_{name}"


def _within(leaf: Leaf, mark: str, names: Mapping[int, str]) -> bool:
    """Whether ``mark`` names the leaf or a container of it."""
    candidates = {mark, f"kwargs['{mark}']"}
    candidates.update(f"args[{i}]" for i, name in names.items() if name == mark)
    if leaf.name == mark:
        return True
    return any(
        leaf.path == path or (leaf.path.startswith(path) and leaf.path[len(path)] in "[.")
        for path in candidates
    )


def _all_exist(marks: Iterable[str], leaves: Sequence[Leaf], names: Mapping[int, str]) -> None:
    for mark in marks:
        if not any(_within(leaf, mark, names) for leaf in leaves):
            raise CaptureError(
                "An option names an input that the examples do not have",
                where=repr(mark),
                expected="one of " + ", ".join(f"{leaf.path} ({leaf.name})" for leaf in leaves),
            )


def bind_inputs(
    graph: ModelGraph,
    program: Program,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
    targets: object = None,
) -> tuple[dict[str, torch.Tensor], int]:
    """The tensors of a call by input name, checked against the capture, and the batch.

    Returns:
        The whole mini-batch's tensors by the names of ``graph.inputs``, and the number of
        samples.

    Raises:
        InputError: if the structure, a constant, a dtype or a shape differs from what was
            captured; the message names the input.
    """
    captured = program.input_spec
    given = dict(kwargs or {})
    order = captured.child(1).context
    if set(given) != set(order):
        missing = [name for name in order if name not in given]
        unknown = [name for name in given if name not in order]
        raise InputError(
            "The keyword inputs are not those of the capture",
            where=", ".join(repr(name) for name in (missing or unknown)),
            expected=f"the keywords {sorted(order)}" if order else "no keyword inputs",
            got=f"{sorted(given)}",
            fix="Pass the same keywords, or capture a variant for this call",
        )
    ordered = {name: given[name] for name in order}
    leaves, spec = pytree.tree_flatten_with_path((tuple(args), ordered, targets))
    if spec != captured:
        what = [
            root
            for root, mine, theirs in zip(_ROOTS, spec.children(), captured.children(), strict=True)
            if mine != theirs
        ]
        raise InputError(
            "The inputs do not have the structure of the capture",
            where=", ".join(what),
            expected=_places(captured),
            got=_places(spec),
            fix="Pass the same arguments, or capture a variant for this call",
        )
    by_path = {item.path: item for item in graph.inputs}
    tensors: dict[str, torch.Tensor] = {}
    batches: dict[str, int] = {}
    for key_path, value in leaves:
        path = _path(key_path)
        item = by_path.get(path)
        if item is None:
            _check_constant(path, program.constants[path], value)
            continue
        if not isinstance(value, torch.Tensor):
            raise InputError(
                "An input is not a tensor",
                where=path,
                expected=f"a tensor of {item.spec.dtype}",
                got=type(value).__name__,
                fix="If it may be absent, capture a variant without it",
            )
        tensors[item.name] = value
        if item.per_sample:
            rows = item.spec.rows_per_sample or 1
            batches[path] = value.shape[0] // rows if value.dim() else 0
    sizes = set(batches.values())
    if len(sizes) > 1:
        raise InputError(
            "The inputs do not have the same number of samples",
            where=", ".join(batches),
            expected="one batch size",
            got=", ".join(f"{path}: {size}" for path, size in batches.items()),
        )
    batch = sizes.pop() if sizes else 0
    if batch < 1 and batches:
        raise InputError(
            "The mini-batch is empty", where=", ".join(batches), expected="at least one sample"
        )
    for item in graph.inputs:
        check_tensor(item.path, item.spec, tensors[item.name], batch)
    return tensors, batch


def check_tensor(where: str, spec: TensorSpec, value: torch.Tensor, samples: int) -> None:
    """Refuses a tensor whose dtype or shape is not that of ``spec`` at ``samples``.

    Raises:
        InputError: naming ``where``, what the capture had and what was given.
    """
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype != spec.dtype:
        raise InputError(
            "An input has another dtype than in the capture",
            where=where,
            expected=spec.dtype,
            got=dtype,
            fix="Convert it, or capture again with this dtype",
        )
    shape = spec.concrete_shape(samples)
    if tuple(value.shape) != shape:
        raise InputError(
            "An input has another shape than in the capture",
            where=where,
            expected=f"shape {shape} for {samples} samples",
            got=f"shape {tuple(value.shape)}",
            fix="All but the batch is fixed by a capture: capture a variant for this shape",
        )


def _check_constant(path: str, captured: object, value: object) -> None:
    if isinstance(value, torch.Tensor):
        got = f"a tensor of shape {tuple(value.shape)}"
    elif type(value) is type(captured) and value == captured:
        return
    else:
        got = repr(value)
    raise InputError(
        "An input that is a constant of the capture has another value",
        where=path,
        expected=repr(captured),
        got=got,
        fix="Capture a variant for this value",
    )


def accepts_targets(loss_fn: Callable[..., object]) -> bool:
    """Whether ``loss_fn`` takes a second positional argument."""
    try:
        inspect.signature(loss_fn).bind(None, None)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _places(spec: pytree.TreeSpec) -> str:
    """Where the leaves of a structure are, for people."""
    tree = pytree.tree_unflatten([0] * spec.num_leaves, spec)
    paths = [_path(key_path) for key_path, _ in pytree.tree_flatten_with_path(tree)[0]]
    more = f" and {len(paths) - 12} more" if len(paths) > 12 else ""
    return f"{len(paths)} values: {', '.join(paths[:12])}{more}"
