"""The plain cost graph."""

from __future__ import annotations

import numpy as np
import pytest

from graphpipe.cost.published.build import UNLIMITED
from graphpipe.cost.published.fields import Fields
from graphpipe.cost.published.plain import read_plain
from graphpipe.errors import CostError, FileFormatError


def _node(name: str, **changes: object) -> dict[str, object]:
    base: dict[str, object] = {"fwd": 1.0, "bwd": 2.0, "param_bytes": 30, "act_bytes": 4.5}
    return {"id": name, **base, "out_bytes": 0.25, **changes}


def _data(*nodes: dict[str, object], edges: object = (), **rest: object) -> Fields:
    values = {"nodes": list(nodes), "edges": [list(edge) for edge in edges], **rest}  # type: ignore[attr-defined]
    return Fields(values, "graph.json")


def test_units_and_memory() -> None:
    data = _data(_node("a"), _node("b"), edges=[("a", "b")], name="pair", bandwidth=5e9)
    graph, costs, defaults = read_plain(data)
    assert graph.name == "pair"
    assert costs.stage_seconds([0, 1], "x", 3) == (pytest.approx(6e-3), pytest.approx(12e-3))
    assert costs.saved_bytes([0, 1]) == (0.0, 9.0)
    assert costs.output_bytes[0].tolist() == [0.0, 0.25]
    assert costs.gradient_bytes[0].tolist() == [0.0, 0.25]
    assert graph.parameter_by_name["a"].nbytes == 30
    assert (costs.parameter_memory.gradient, costs.parameter_memory.optimizer) == (0.0, 0.0)
    cluster = defaults.cluster(devices=2)
    assert cluster.devices[1].memory_bytes == UNLIMITED
    assert cluster.network.intra_node_bandwidth == 5e9
    with pytest.raises(CostError, match="--devices"):
        defaults.cluster()
    with pytest.raises(CostError, match="Not a number of devices"):
        defaults.cluster(devices=0)
    assert defaults.cluster(devices=1, memory_bytes=7, bandwidth=3.0).devices[0].memory_bytes == 7


def test_frozen_nodes_have_no_gradient_until_something_trained_precedes_them() -> None:
    nodes = [_node("tower", bwd=0), _node("adapter"), _node("frozen", bwd=0)]
    edges = [("tower", "adapter"), ("adapter", "frozen")]
    graph, costs, _ = read_plain(_data(*nodes, edges=edges))
    assert [op.requires_grad for op in graph.ops] == [False, True, True]
    assert [item.trainable for item in graph.parameters] == [False, True, False]
    assert costs.gradient_bytes[:, 1].tolist() == [0.0, 0.25, 0.25]


def test_order_is_topological_and_keeps_that_of_the_file() -> None:
    nodes = [_node(name) for name in "dcba"]
    graph, _, _ = read_plain(_data(*nodes, edges=[("a", "c"), ("b", "d")]))
    assert [op.name for op in graph.ops] == ["b", "d", "a", "c"]


def test_an_excluded_size_is_infinite_and_the_others_are_not() -> None:
    _, costs, _ = read_plain(_data(_node("a"), _node("b", profile_error="no memory at batch 8")))
    assert np.isinf(costs.op_seconds("x", 8)[0]).tolist() == [False, True]
    assert np.isfinite(costs.op_seconds("x", 4)[0]).all()
    assert costs.exclusions[0].reason == "no memory at batch 8"
    assert costs.stage_seconds([1], "x", 8) == (np.inf, np.inf)
    with pytest.raises(FileFormatError, match="node 'b', field 'profile_error'"):
        read_plain(_data(_node("b", profile_error="it broke")))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, "1", None, True, [1], 10**400])
@pytest.mark.parametrize("field", ["fwd", "bwd", "param_bytes", "act_bytes", "out_bytes"])
def test_every_cost_field_is_checked(field: str, value: object) -> None:
    with pytest.raises(FileFormatError, match=f"graph.json, node 'a', field '{field}'"):
        read_plain(_data(_node("a", **{field: value})))
