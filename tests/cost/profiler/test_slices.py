"""Slices: where they are cut, that they compute what the model computes, and the fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphpipe.cost.profiler.evict import Evictor
from graphpipe.cost.profiler.facts import facts_at, program_of
from graphpipe.cost.profiler.slices import (
    LEAST_OPS,
    Correction,
    Slice,
    SliceRunner,
    fit_correction,
    slices_of,
)
from tests.cost.profiler.model import hard_graph

CPU = torch.device("cpu")


def test_slices_keep_groups_whole_and_do_not_overlap() -> None:
    graph = hard_graph()
    found = slices_of(graph)
    assert found
    names = [name for part in found for name in part.ops]
    assert len(names) == len(set(names))
    for part in found:
        assert len(part.ops) >= LEAST_OPS
        groups = {graph.op_by_name[name].group for name in part.ops} - {None}
        for op in graph.ops:
            if op.group in groups and not op.prep:
                assert op.name in part.ops
    assert len(slices_of(graph, most=1)) == 1


def test_a_slice_runs_forward_and_backward() -> None:
    graph = hard_graph()
    facts = facts_at(graph, 4)
    everything = Slice(tuple(op.name for op in graph.ops if not op.prep))
    for part in (*slices_of(graph), everything):
        runner = SliceRunner(graph, part, facts, 4, CPU, Evictor(graph, CPU))
        forward, backward = runner.run(2)
        assert forward.seconds > 0
        assert backward.seconds > 0
        for tensor in runner.state.values():
            assert (tensor.grad is not None) == tensor.requires_grad


def test_a_slice_holds_parameters_of_its_own() -> None:
    graph = hard_graph()
    before = {name: value.clone() for name, value in program_of(graph).state.items()}
    everything = Slice(tuple(op.name for op in graph.ops if not op.prep))
    runner = SliceRunner(graph, everything, facts_at(graph, 2), 2, CPU, Evictor(graph, CPU))
    runner.run(1)
    own = runner.state
    assert set(own) == {item.name for item in graph.parameters}
    for name, value in program_of(graph).state.items():
        assert torch.equal(value, before[name])
        assert value.grad is None
        assert own.get(name) is not value


def test_the_fit_finds_factor_and_overhead() -> None:
    sums = np.array([1e-4, 1e-3, 1e-2, 1e-1])
    ops = np.array([50.0, 40.0, 60.0, 30.0])
    exact = fit_correction(1.02 * sums + 2e-6 * ops, sums, ops)
    assert exact.factor == pytest.approx(1.02, rel=0.02)
    assert exact.overhead * exact.factor == pytest.approx(2e-6, rel=0.2)
    # Slices that are all alike: the factor stays near one.
    same = fit_correction(np.full(4, 1.3e-3), np.full(4, 1e-3), np.full(4, 30.0))
    assert same.factor * (1e-3 + same.overhead * 30) == pytest.approx(1.3e-3, rel=0.02)
    assert 0.9 < same.factor < 1.35


def test_the_fit_without_usable_slices_changes_nothing() -> None:
    assert fit_correction(np.zeros(0), np.zeros(0), np.zeros(0)) == Correction(1.0, 0.0)
    assert fit_correction(np.zeros(2), np.ones(2), np.ones(2)) == Correction(1.0, 0.0)
