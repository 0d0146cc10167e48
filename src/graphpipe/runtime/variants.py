"""Finds the variant of the graph that fits a call, and captures it when it is needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphpipe.errors import InputError, RuntimeSetupError
from graphpipe.graph.capture import capture
from graphpipe.graph.expression import evaluate
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.graph.signature import bind_inputs
from graphpipe.plan.actions import Ordering
from graphpipe.plan.plan import InputSignature, Plan
from graphpipe.plan.validate import validate
from graphpipe.runtime.autocast_types import with_autocast_types
from graphpipe.runtime.inputs import check_loaded, path_of, shape_only
from graphpipe.runtime.rank_program import dtype_of
from graphpipe.runtime.slices import as_planned
from graphpipe.runtime.variant import Purpose, Variant, map_plan

_EXAMPLE_BATCH = 2


class VariantCache:
    """The variants of one pipeline.

    Attributes:
        ranks: The ranks that this process runs.
        first: The variant that was planned.

    Args:
        model: The model.
        plan: Its plan.
        loss_fn: The loss function.
        graph: The graph that was planned; None: it is captured from the plan's signature.
        options: Options of ``capture``.
        capture_new: Whether training inputs of another signature are captured or refused.
        autocast: (device type, dtype) of an autocast around all forwards, or None.
        ordering: Of messages.

    Raises:
        RuntimeSetupError: if the graph is not the one that was planned.
        PlanError: if the plan breaks a rule.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        loss_fn: Callable[..., Any] | None,
        graph: ModelGraph | None,
        options: Mapping[str, Any],
        *,
        capture_new: bool,
        autocast: tuple[str, torch.dtype] | None = None,
        ordering: Ordering = "channel",
    ) -> None:
        self.ranks: tuple[int, ...] = ()
        self._model = model
        self._plan = plan
        self._loss_fn = loss_fn
        self._options = dict(options)
        self._capture_new = capture_new
        self._autocast = autocast
        self._ordering: Ordering = ordering
        if graph is None:
            graph = self._capture_again()
        graph = as_planned(graph, plan)
        _check_same(plan, graph)
        validate(plan, graph)
        self._graph = graph
        purpose: Purpose = "train" if graph.loss_terms else "predict"
        origin = tuple(range(len(plan.stages)))
        self.first = self._variant(graph, plan, purpose, origin)
        self._known: dict[Purpose, list[Variant]] = {purpose: [self.first]}

    def _variant(
        self, graph: ModelGraph, plan: Plan, purpose: Purpose, origin: tuple[int, ...]
    ) -> Variant:
        if self._autocast is not None:
            plan = with_autocast_types(plan, graph, *self._autocast)
        return Variant(graph, plan, purpose, origin, self._ordering)

    def bind(
        self,
        purpose: Purpose,
        args: Sequence[Any] | torch.Tensor,
        kwargs: Mapping[str, Any] | None,
        targets: Any,
    ) -> tuple[Variant, list[Any], int]:
        """The variant for a call, the values of its inputs, and the number of samples.

        Inputs that no stage of this process reads may be on the meta device: every process
        sees the same structure and shapes, so all choose the same variant.

        Raises:
            InputError: if the inputs are not those of the capture.
        """
        given = (args,) if isinstance(args, torch.Tensor) else tuple(args)
        known = self._known.setdefault(purpose, [])
        refusal: InputError | None = None
        for variant in known:
            try:
                return self._bind_to(variant, given, kwargs, targets)
            except InputError as error:
                refusal = refusal or error
        if refusal is not None and not self._capture_new:
            raise refusal
        known.append(self._capture_variant(purpose, given, kwargs, targets))
        return self._bind_to(known[-1], given, kwargs, targets)

    def _bind_to(
        self,
        variant: Variant,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        targets: Any,
    ) -> tuple[Variant, list[Any], int]:
        graph = variant.graph
        found, samples = bind_inputs(graph, variant.program, args, kwargs or {}, targets)
        check_loaded(graph, self.unread(variant), found)
        return variant, [found[item.name] for item in graph.inputs], samples

    def unread(self, variant: Variant) -> set[str]:
        """Paths of the inputs that no stage of this process reads."""
        read = {name for rank in self.ranks for name in variant.needs(rank)}
        # What is handed back as it came has values somewhere only if each rank has them.
        anywhere = {name for rank in range(self._plan.world_size) for name in variant.needs(rank)}
        read |= set(variant.graph.outputs) - anywhere
        return {item.path for item in variant.graph.inputs if item.name not in read}

    def _capture_variant(
        self,
        purpose: Purpose,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        targets: Any,
    ) -> Variant:
        args, kwargs, targets = _at_least_two(self._graph, args, kwargs or {}, targets)
        # Some ranks have no more than shapes, and all must capture the same.
        args, kwargs, targets = shape_only((tuple(args), dict(kwargs), targets))
        with_loss = purpose != "predict"
        graph = capture(
            self._model,
            args,
            kwargs,
            targets=targets if with_loss else None,
            loss_fn=self._loss_fn if with_loss else None,
            **(self._options | {"training": purpose == "train"}),
        )
        graph = as_planned(graph, self._plan)
        plan, origin = map_plan(self._plan, self._graph, graph)
        return self._variant(graph, plan, purpose, origin)

    def _capture_again(self) -> ModelGraph:
        """The graph of the plan's own input signature."""
        args, kwargs, targets = _examples(self._plan.inputs)
        options = {"name": self._plan.model or None, **self._options}
        return capture(self._model, args, kwargs, targets=targets, loss_fn=self._loss_fn, **options)


def _check_same(plan: Plan, graph: ModelGraph) -> None:
    if plan.fingerprint == graph.fingerprint:
        return
    planned = [name for stage in plan.stages for name in stage.ops]
    unknown = [name for name in planned if name not in graph.op_by_name]
    rest = set(planned)
    missing = [op.name for op in graph.ops if not op.prep and op.name not in rest]
    detail = "the same ops but other shapes, parameters or options"
    if unknown or missing:
        detail = "; ".join(
            f"{what}: {', '.join(names[:3])}"
            for what, names in (("only in the plan", unknown), ("only in the model", missing))
            if names
        )
    raise RuntimeSetupError(
        "The model is not the one that was planned",
        where=plan.model or "plan",
        expected=f"a graph with fingerprint {plan.fingerprint}",
        got=f"{graph.fingerprint} ({detail})",
        fix="Give the graph that was planned as graph=..., or plan again for this model",
    )


_SIMPLE = re.compile(r"(args|kwargs|targets)(?:\[(\d+|'[^']*')\])?\Z")


def _examples(inputs: Sequence[InputSignature]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Example inputs of a plan's signature, on the meta device.

    Raises:
        RuntimeSetupError: if an input lies deeper than the signature says how to rebuild.
    """
    args: dict[int, Any] = {}
    kwargs: dict[str, Any] = {}
    targets: Any = None
    for item in inputs:
        shape = [evaluate(size, _EXAMPLE_BATCH) for size in item.shape]
        value = torch.zeros(shape, dtype=dtype_of(item.dtype), device="meta")
        found = _SIMPLE.match(item.path)
        if found is None or (found[1] != "targets") == (found[2] is None):
            raise RuntimeSetupError(
                "The plan alone does not say how the inputs are nested",
                where=item.path,
                fix="Give the captured graph as graph=...",
            )
        if found[1] == "args":
            args[int(found[2])] = value
        elif found[1] == "kwargs":
            kwargs[found[2].strip("'")] = value
        elif found[2] is None:
            targets = value
        else:
            targets = targets or {}
            key = found[2]
            targets[key.strip("'") if key.startswith("'") else int(key)] = value
    if isinstance(targets, dict) and all(isinstance(key, int) for key in targets):
        targets = tuple(targets[key] for key in sorted(targets))
    return tuple(args[i] for i in sorted(args)), kwargs, targets


def _at_least_two(
    graph: ModelGraph, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Any
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Examples with at least two samples: a single one is doubled."""
    rows = {
        item.path: (item.spec.rows_per_sample or 1) if item.per_sample else 0
        for item in graph.inputs
    }
    leaves, spec = pytree.tree_flatten_with_path((tuple(args), dict(kwargs), targets))
    values = [value for _, value in leaves]
    paths = [path_of(path) for path, _ in leaves]
    tensors = [
        i
        for i, value in enumerate(values)
        if isinstance(value, torch.Tensor) and value.dim() > 0 and rows.get(paths[i], 1)
    ]
    # All that has samples is doubled, or nothing: inputs may have several rows a sample, and
    # an input that the planned graph does not know has as many samples as the others.
    if any(values[i].shape[0] == rows.get(paths[i], 1) for i in tensors):
        for i in tensors:
            values[i] = torch.cat([values[i], values[i]])
    rebuilt: tuple[tuple[Any, ...], dict[str, Any], Any] = pytree.tree_unflatten(values, spec)
    return rebuilt
