"""What finalists are chosen by is what the plan then promises."""

from __future__ import annotations

from graphpipe.cost.cluster import Network
from graphpipe.planner.evaluate import score
from graphpipe.planner.explore import Found
from graphpipe.planner.layout import Layout
from graphpipe.planner.realise import by_contention, contended_ns, realised
from graphpipe.planner.seeds import Plane
from graphpipe.planner.space import Space
from tests.planner.synthetic import cluster_of, towers, units_of


def test_copies_side_by_side_are_simulated_with_one_another() -> None:
    file = towers(2, 2, 1)
    network = Network(intra_node_bandwidth=1e10, inter_node_bandwidth=2e8, devices_per_nic=2)
    cluster = cluster_of(4, per_node=2).model_copy(update={"network": network})
    units = units_of(file)
    space = Space(units, cluster, 16, (2.0**40,) * 4, (0,) * len(units))
    found = []
    for far in (False, True):
        for batch in (1, 2, 4):
            layout = Layout(2, (1, 1), (0, 1, 0, 1, 1), batch, slack=1, far=far)
            point = Plane(0.0, 2, 2, far, batch, True)
            result = score(space, layout)
            assert result is not None
            found.append(Found(layout, result, point))
    for item in found:
        prediction = realised(space, item).prediction
        assert prediction is not None
        assert contended_ns(space, item) == prediction.iteration_ns
    best = by_contention(space, found)
    assert contended_ns(space, best) == min(contended_ns(space, item) for item in found)
