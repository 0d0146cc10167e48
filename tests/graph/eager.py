"""Compares a captured program with the model that it was captured from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from graphpipe.graph.model_graph import ModelGraph
from graphpipe.graph.signature import bind_inputs


def run_program(
    graph: ModelGraph, args: Sequence[Any], kwargs: Mapping[str, Any] | None, targets: Any
) -> tuple[torch.Tensor | None, Any]:
    """Loss and output of the program for the whole batch as one micro-batch."""
    program = graph.program
    assert program is not None
    tensors, batch = bind_inputs(graph, program, args, kwargs, targets)
    results = program.module(batch, *(tensors[item.name] for item in graph.inputs))
    terms, outputs = len(graph.loss_terms), len(graph.outputs)
    counts = iter(results[terms + outputs :])
    loss: torch.Tensor | None = None
    for term, value in zip(graph.loss_terms, results[:terms], strict=True):
        if term.reduction == "sum_count":
            count = float(next(counts)) + term.count_offset
            if term.count_min is not None:
                count = max(count, term.count_min)
            value = value / count
        part = term.sign * value
        loss = part if loss is None else loss + part
    output = program.output.restore(results[terms : terms + outputs], samples=batch, loss=loss)
    return loss, output


def assert_equals_eager(
    graph: ModelGraph,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    targets: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    *,
    atol: float = 1e-6,
) -> None:
    """Loss, output, gradients and buffers of one forward and backward."""
    state = copy.deepcopy(model.state_dict())
    kwargs = dict(kwargs or {})

    def step(run: Callable[[], tuple[Any, Any]]) -> tuple[Any, ...]:
        model.load_state_dict(state)
        model.zero_grad()
        torch.manual_seed(3)
        loss, output = run()
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.backward()
        gradients = {
            name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
        }
        return loss, output, gradients, {n: b.clone() for n, b in model.named_buffers()}

    def eager() -> tuple[Any, Any]:
        output = model(*copied(args), **copied(kwargs))
        if loss_fn is None:
            loss = output if isinstance(output, torch.Tensor) else output.get("loss")
        elif targets is None:
            loss = loss_fn(output)
        else:
            loss = loss_fn(output, targets)
        return loss, output

    expected = step(eager)
    got = step(lambda: run_program(graph, copied(args), copied(kwargs), targets))
    model.load_state_dict(state)
    model.zero_grad()
    torch.testing.assert_close(got[0], expected[0], atol=atol, rtol=1e-5, equal_nan=True)
    left, spec = pytree.tree_flatten(got[1])
    right, other = pytree.tree_flatten(expected[1])
    assert spec == other
    for a, b in zip(left, right, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, atol=atol, rtol=1e-5, equal_nan=True)
        else:
            assert a == b
    for name, gradient in expected[2].items():
        if gradient is None:
            assert got[2][name] is None, name
        else:
            torch.testing.assert_close(got[2][name], gradient, atol=atol, rtol=1e-5, msg=name)
    for name, buffer in expected[3].items():
        torch.testing.assert_close(got[3][name], buffer, msg=name)


def copied(tree: Any) -> Any:
    """A deep copy of the tensors, so that a model that writes to its inputs harms nobody."""
    return pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)


def first(tree: Any, samples: int, batch: int) -> Any:
    """The first samples of every tensor whose dimension 0 is the batch."""

    def cut(leaf: Any) -> Any:
        whole = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == batch
        return leaf[:samples] if whole else leaf

    return pytree.tree_map(cut, tree)


def values_of(graph: ModelGraph, batch: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The value of every op for these inputs."""
    found: dict[str, Any] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            value = super().run_node(node)
            found[node.name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
            return value

    assert graph.program is not None
    given = (tensors[item.name] for item in graph.inputs)
    Recorder(graph.program.module).run(batch, *given)
    return found


def assert_rows_are_independent(
    graph: ModelGraph, tensors: Mapping[str, torch.Tensor], batch: int
) -> int:
    """Every value that may cross a boundary is the same whatever samples are together.

    Values that depend on a coupled or random op are left out. Returns how many were compared.
    """
    tainted: set[str] = set()
    for op in graph.ops:
        if op.coupled or op.random or any(name in tainted for name in op.inputs):
            tainted.add(op.name)
    whole = values_of(graph, batch, tensors)
    compared = 0
    for low, high in ((0, 1), (1, batch), (0, batch // 2)):
        piece = {}
        for item in graph.inputs:
            rows = item.spec.rows_per_sample or 0
            value = tensors[item.name]
            piece[item.name] = value[low * rows : high * rows] if item.per_sample else value
        part = values_of(graph, high - low, piece)
        for op in graph.ops:
            if op.name in tainted or not op.crossable or op.output is None:
                continue
            rows = op.output.rows_per_sample
            expected = whole[op.name]
            if rows is not None:
                expected = expected[low * rows : high * rows]
            torch.testing.assert_close(
                part[op.name],
                expected,
                atol=1e-5,
                rtol=1e-4,
                msg=lambda text, n=op.name: f"{n}: {text}",
            )
            compared += 1
    return compared
