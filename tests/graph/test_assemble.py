"""The graph as data and its program, of one small model."""

from __future__ import annotations

import torch

from tests.graph.small import small


def test_ties_buffers_and_constants_are_parameters_of_their_own_kind() -> None:
    _, graph = small()
    held = {item.name: item for item in graph.parameters}
    tied = held["first_copy"] if "first_copy" in held else held["second.weight"]
    assert {tied.name, *tied.aliases} == {"first_copy", "second.weight"}
    assert held["first.weight"].trainable
    assert not held["first.weight"].is_buffer
    assert (held["norm.running_mean"].is_buffer, held["norm.running_mean"].trainable) == (
        True,
        False,
    )
    assert not any(item.persistent for name, item in held.items() if name.startswith("_constants"))


def test_batch_norm_is_coupled_changes_its_buffers_and_needs_two_samples() -> None:
    _, graph = small()
    norm = next(op for op in graph.ops if op.target.startswith("aten.batch_norm"))
    assert norm.coupled
    assert set(norm.mutates) == {"norm.running_mean", "norm.running_var"}
    assert [(c.op, c.min_samples) for c in graph.batch_conditions] == [(norm.name, 2)]
    assert norm.module == "norm"


def test_keys_are_unique_and_program_nodes_are_the_ops() -> None:
    _, graph = small()
    assert len({op.key for op in graph.ops}) == len(graph.ops)
    assert graph.program is not None
    names = {node.name for node in graph.program.module.graph.nodes}
    assert {op.name for op in graph.ops} <= names


def test_sizes_and_work_are_expressions_of_the_batch() -> None:
    _, graph = small()
    first = next(op for op in graph.ops if op.parameters[:1] == ("first.weight",))
    assert first.output is not None
    assert first.output.shape == ("b", 4)
    assert first.requires_grad
    assert first.crossable


def test_the_output_is_restored_with_sizes_and_constants() -> None:
    _, graph = small()
    assert graph.program is not None
    restored = graph.program.output.restore([torch.ones(7, 4)], samples=7)
    assert isinstance(restored, dict)
    assert (restored["rows"], restored["name"], restored["h"].shape) == (7, "small", (7, 4))
