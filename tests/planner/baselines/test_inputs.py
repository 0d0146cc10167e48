"""What the optimisers read, and fusing of chains."""

from __future__ import annotations

import numpy as np
import pytest

from graphpipe.cost.published.build import KIND, Node
from graphpipe.cost.published.piper import (
    RECOMPUTE,
    VANILLA,
    PiperConfiguration,
    PiperFile,
    PiperNode,
)
from graphpipe.errors import CostError
from graphpipe.planner.baselines.downsets import DownSetLimitError, enumerate_down_sets
from graphpipe.planner.baselines.inputs import (
    fuse_chains,
    pipedream_costs,
    piper_input,
    piper_input_of_file,
    unit_edges,
)
from tests.planner.synthetic import graph_of, towers, units_of


def test_piper_gets_plain_and_recomputing_costs() -> None:
    units = units_of(towers(2, 1, 1))
    given = piper_input(units, KIND, 4, micro_batches=8, memory_bytes=1e9, bandwidth=1e9)
    costs = given.configurations[1]
    assert costs.seconds[0].tolist() == pytest.approx([12e-3, 16e-3])
    # Weights, gradients and two moments; saved 1e6 a sample; recomputing keeps the input.
    assert costs.memory_b[2].tolist() == pytest.approx([16e6, 16e6 + 4e6 - 0.8e6])
    assert costs.memory_a[2].tolist() == pytest.approx([4e6, 0.8e6])
    assert given.edges == ((0, 2), (1, 2))
    assert given.edge_bytes.tolist() == pytest.approx([4e5, 4e5])
    assert costs.parameter_bytes[:, 0].tolist() == pytest.approx([4e6] * 3)


def test_a_frozen_unit_recomputes_nothing() -> None:
    units = units_of(graph_of([Node(id="a", forward=1e-3, trainable=False)], []))
    given = piper_input(units, KIND, 1, micro_batches=1, memory_bytes=1.0, bandwidth=1.0)
    assert given.configurations[1].seconds[0].tolist() == [1e-3, 1e-3]


def test_pipedream_gets_the_sum_of_both_directions() -> None:
    units = units_of(towers(1, 2, 0))
    costs = pipedream_costs(units, KIND, 2)
    assert costs.seconds.tolist() == pytest.approx([6e-3, 6e-3])
    assert costs.activation_bytes.tolist() == pytest.approx([2e5, 0.0])


def test_chains_are_fused_until_there_are_few_down_sets() -> None:
    units = units_of(towers(3, 8, 4))
    fused = fuse_chains(units, [1.0] * len(units), limit=100)
    edges = unit_edges(fused)
    assert len(enumerate_down_sets(len(fused), edges, limit=100)) <= 100
    assert all(a < b for a, b in edges)
    before = sorted(op for ops in units.members for op in ops)
    assert sorted(op for ops in fused.members for op in ops) == before
    # Branches stay branches: no unit holds ops of two of them.
    names = [{units.graph.ops[op].name.split(".")[0] for op in ops} for ops in fused.members]
    assert all(len(item) == 1 for item in names)


def test_a_small_graph_stays_as_it_is() -> None:
    units = units_of(towers(2, 2, 1))
    assert fuse_chains(units, [1.0] * len(units), limit=1000) is units


def test_without_chains_twins_are_fused() -> None:
    nodes = [Node(id=f"t{i}", forward=1e-3, backward=1e-3) for i in range(26)]
    nodes.append(Node(id="join", forward=1e-3, backward=1e-3))
    units = units_of(graph_of(nodes, [(f"t{i}", "join") for i in range(26)]))
    fused = fuse_chains(units, [1.0] * len(units), limit=200)
    assert len(fused) <= 8


def test_where_nothing_can_be_fused_the_limit_holds() -> None:
    units = units_of(towers(2, 1, 1))
    with pytest.raises(DownSetLimitError):
        fuse_chains(units, [1.0] * 3, limit=1)


def test_a_published_input_of_piper_keeps_its_degrees_and_traffic() -> None:
    plain = PiperConfiguration(1.0, 8.0, 4.0, 16.0, {}, {"b": 3.0})
    again = PiperConfiguration(1.5, 8.0, 1.0, 19.0, {}, {"b": 3.0})
    double = PiperConfiguration(0.6, 4.0, 2.0, 8.0, {}, {"b": 5.0})
    reader = PiperConfiguration(2.0, 8.0, 4.0, 16.0, {"a": 7.0}, {})
    file = PiperFile(
        devices=4,
        memory_bytes=100,
        bandwidth=None,
        micro_batches=8,
        nodes=(
            PiperNode("a", "a", {(1, VANILLA): plain, (1, RECOMPUTE): again, (2, VANILLA): double}),
            PiperNode("b", "b", {(1, VANILLA): reader}),
        ),
        edges={("a", "b"): 11.0},
    )
    with pytest.raises(CostError, match="bandwidth"):
        piper_input_of_file(file)
    given = piper_input_of_file(file, bandwidth=2.0)
    assert (given.memory_bytes, given.bandwidth, given.micro_batches) == (100.0, 2.0, 8)
    assert (given.edges, given.edge_bytes.tolist()) == (((0, 1),), [11.0])
    one, two = given.configurations[1], given.configurations[2]
    assert one.seconds.tolist() == [[1.0, 1.5], [2.0, 2.0]]
    assert (one.extra_in.tolist(), one.extra_out.tolist()) == ([7.0], [3.0])
    # The second node cannot run on two devices.
    assert np.isnan(two.seconds[1]).all()
    assert two.seconds[0].tolist() == [0.6, 0.6]
    assert two.extra_out.tolist() == [5.0]


def test_residuals_do_not_keep_chains_from_being_fused() -> None:
    """a -> b -> c with a skip from a to c: three units in a row."""
    nodes = [Node(id=name, forward=1e-3, backward=1e-3) for name in "abcd"]
    units = units_of(graph_of(nodes, [("a", "b"), ("b", "c"), ("a", "c"), ("c", "d")]))
    assert len(fuse_chains(units, [1.0] * 4, limit=2)) == 1


def test_no_more_is_fused_than_it_takes() -> None:
    """Four towers of six: halving a tower's steps one pair at a time comes close to the limit."""
    units = units_of(towers(4, 6, 1))
    fused = fuse_chains(units, [1.0] * len(units), limit=1000)
    found = len(enumerate_down_sets(len(fused), unit_edges(fused)))
    assert 600 <= found <= 1000
