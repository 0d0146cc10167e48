"""A plan fits at its simulated peak, or the error names memory and what would help."""

from __future__ import annotations

import pytest

from graphpipe.cost.published.build import GraphFile, Node
from graphpipe.errors import InfeasibleError
from graphpipe.plan.validate import problems_of
from graphpipe.planner.search import plan
from tests.planner.synthetic import cluster_of, graph_of, towers


def two_towers() -> GraphFile:
    """Two towers of four layers, joined: 64 kB with gradients and optimizer state, and each
    layer keeps 1 kB a sample and hands on as much."""
    nodes, edges = [], []
    for tower in range(2):
        for layer in range(4):
            nodes.append(_node(f"t{tower}.{layer}", 1e-3, 2_000.0, 1_000.0))
            if layer:
                edges.append((f"t{tower}.{layer - 1}", f"t{tower}.{layer}"))
    nodes.append(_node("loss", 1e-4, 0.0, 100.0))
    edges += [("t0.3", "loss"), ("t1.3", "loss")]
    return graph_of(nodes, edges)


def _node(name: str, forward: float, parameters: float, kept: float) -> Node:
    return Node(
        id=name,
        forward=forward,
        backward=2 * forward,
        parameter_bytes=parameters,
        saved_bytes=kept,
        output_bytes=kept,
    )


@pytest.mark.parametrize("recompute", ["auto", False])
@pytest.mark.parametrize("memory", [60e3, 90e3, 130e3, 200e3, 260e3, 420e3])
def test_a_plan_fits_or_the_error_names_memory(memory: float, recompute: str | bool) -> None:
    file = two_towers()
    cluster = cluster_of(3, memory_bytes=memory, bandwidth=1e9)
    refused: InfeasibleError | None = None
    try:
        found = plan(file.graph, file.costs, cluster, batch_size=48, recompute=recompute)
    except InfeasibleError as error:
        refused = error
    if refused is not None:
        assert "memory" in refused.what or "fit" in refused.what
        assert None not in (refused.expected, refused.got, refused.fix)
        return
    assert list(problems_of(found, file.graph)) == []
    assert found.prediction is not None
    assert max(found.prediction.peak_memory) <= memory


def test_more_memory_is_never_worse() -> None:
    file = two_towers()
    times = []
    for memory in (130e3, 200e3, 420e3, 1e9):
        cluster = cluster_of(3, memory_bytes=memory, bandwidth=1e9)
        found = plan(file.graph, file.costs, cluster, batch_size=48)
        assert found.prediction is not None
        times.append(found.prediction.iteration_ns)
    assert times == sorted(times, reverse=True)


def test_the_remedy_works() -> None:
    file = towers(1, 8, 0)
    options = {"batch_size": 32, "micro_batches": [8], "copies": 1, "replicas": False}
    with pytest.raises(InfeasibleError, match="recompute='auto'"):
        plan(
            file.graph, file.costs, cluster_of(2, memory_bytes=124e6), recompute=False,
            stages=2, **options,
        )  # fmt: skip
    # All parameters fit on one device, but not what a single sample keeps.
    options["micro_batches"] = [1]
    tight = cluster_of(1, memory_bytes=130e6)
    with pytest.raises(InfeasibleError, match=r"with (\d+) more device") as caught:
        plan(file.graph, file.costs, tight, **options)
    more = int(str(caught.value.fix).split("with ")[1].split()[0])
    found = plan(file.graph, file.costs, cluster_of(1 + more, memory_bytes=130e6), **options)
    assert list(problems_of(found, file.graph)) == []
