"""The lower bound: closed forms, the exhaustive optimum, the explanation of the gap."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from graphpipe.cost.cluster import Cluster, Device, Network
from graphpipe.cost.published.build import KIND, GraphFile, Node
from graphpipe.cost.table import CostTable, DeviceCosts
from graphpipe.plan.assemble import StageChoice, assemble
from graphpipe.planner.lower_bound import (
    LowerBound,
    all_reduce_ways,
    explain_gap,
    lower_bound,
    plan_gap,
)
from tests.planner.every_plan import fastest_ns
from tests.planner.synthetic import MS, cluster_of, graph_of, random_graph, towers


def _bound(file: GraphFile, cluster: Cluster, batch_size: int) -> LowerBound:
    return lower_bound(file.graph, file.costs, cluster, batch_size)


def _with_optimizer(file: GraphFile, seconds_per_byte: float) -> GraphFile:
    devices = {
        kind: DeviceCosts(item.forward, item.backward, seconds_per_byte)
        for kind, item in file.costs.devices.items()
    }
    return file._replace(costs=replace(file.costs, devices=devices))


def test_on_one_device_it_is_the_work() -> None:
    bound = _bound(towers(2, 2, 1), cluster_of(1), 8)
    assert bound.seconds == pytest.approx(5 * 3e-3 * 8, rel=1e-5)
    assert bound.ideal_work == pytest.approx(5 * 3e-3 * 8, rel=1e-5)


def test_free_replicas_divide_everything_but_one_sample() -> None:
    """Two nodes of 3 ms, 4 samples on 8 devices: 3 are shared out, a sample takes 6 ms."""
    bound = _bound(towers(1, 2, 0), cluster_of(8), 4)
    assert bound.work == pytest.approx(2 * 3e-3 * 4 / 8, rel=1e-5)
    assert bound.way == pytest.approx(6e-3, rel=1e-3)
    assert bound.binding == "way"


def test_fill_and_drain_surround_the_work_between() -> None:
    """The short op's forwards (1 ms, 6 samples, 8 devices) are followed by a long forward
    (10 ms) and by two backwards (1 ms and 2 ms) of the last sample."""
    nodes = [
        Node(id="short", forward=1 * MS, backward=2 * MS, output_bytes=1.0),
        Node(id="long", forward=10 * MS, backward=1 * MS, output_bytes=1.0),
    ]
    bound = _bound(graph_of(nodes, [("short", "long")]), cluster_of(8), 6)
    assert bound.fill_drain == pytest.approx((6 / 8 + 10 + 1 + 2) * MS, rel=1e-5)
    assert bound.work == pytest.approx(6 * 14 * MS / 8, rel=1e-5)


def test_an_op_too_dear_to_replicate_bounds_alone() -> None:
    nodes = [
        Node(id="table", forward=1 * MS, backward=2 * MS, parameter_bytes=1e9, output_bytes=1.0),
        Node(id="other", forward=1 * MS, backward=2 * MS, output_bytes=1.0),
    ]
    bound = _bound(graph_of(nodes, [("table", "other")]), cluster_of(8, bandwidth=1e9), 16)
    assert bound.indivisible == pytest.approx(16 * 3 * MS, rel=1e-5)
    assert (bound.indivisible_ops, bound.indivisible_devices) == (("table",), 1)


def test_a_replica_is_worth_what_its_all_reduce_costs() -> None:
    """96 ms alone; on two devices 48 ms and an all-reduce of 2/2 x 10 MB at 1 GB/s: 10 ms; on
    three 32 + 13.3 ms; on four 24 + 15 ms; on eight 12 + 17.5 ms, the best."""
    nodes = [Node(id="op", forward=1 * MS, backward=2 * MS, parameter_bytes=1e7)]
    file = graph_of(nodes, [])
    for devices, expected in ((1, 96.0), (2, 58.0), (3, 32 + 40 / 3), (4, 39.0), (8, 29.5)):
        bound = _bound(file, cluster_of(devices, bandwidth=1e9), 32)
        assert bound.indivisible == pytest.approx(expected * MS, rel=1e-5)
        assert bound.indivisible_devices == devices


def test_units_that_stay_single_are_packed() -> None:
    """Three equal tables on two devices: one device holds two."""
    nodes = [
        Node(id=f"t{i}", forward=1 * MS, backward=2 * MS, parameter_bytes=1e10, output_bytes=1.0)
        for i in range(3)
    ]
    bound = _bound(graph_of(nodes, []), cluster_of(2, bandwidth=1e9), 8)
    assert bound.packing == pytest.approx(2 * 8 * 3 * MS, rel=1e-5)
    assert bound.binding == "packing"


def test_the_best_micro_batch_size_counts() -> None:
    """1 ms for one sample, 2 ms for four, 8 ms for eight: half a millisecond a sample."""
    file = graph_of([Node(id="op", forward=1 * MS, trainable=False)], [])
    times = np.array([[1.0, 2.0, 8.0]]) * MS
    costs = replace(
        file.costs,
        micro_batches=(1, 4, 8),
        devices={KIND: DeviceCosts(times, np.zeros((1, 3)))},
    )
    cluster = cluster_of(1)
    assert lower_bound(file.graph, costs, cluster, 8).seconds == pytest.approx(4 * MS, rel=1e-5)
    # With three samples at most, none reaches the best size: 5/3 ms for three.
    three = lower_bound(file.graph, costs, cluster, 3)
    assert three.seconds == pytest.approx(5 / 3 * MS, rel=1e-5)


def test_a_slow_device_counts_in_part() -> None:
    file = towers(1, 1, 0)
    slow = {
        "fast": file.costs.devices[KIND],
        "slow": DeviceCosts(
            file.costs.devices[KIND].forward * 4, file.costs.devices[KIND].backward * 4
        ),
    }
    costs: CostTable = replace(file.costs, devices=slow, source="analytic")
    cluster = Cluster(
        devices=(Device(kind="fast", memory_bytes=1), Device(kind="slow", memory_bytes=1)),
        network=Network(),
    )
    bound = lower_bound(file.graph, costs, cluster, 100)
    assert bound.capacity == pytest.approx(1.25)
    assert bound.work == pytest.approx(100 * 3e-3 / 1.25, rel=1e-5)


def test_the_optimizer_step_is_part_of_the_work() -> None:
    file = _with_optimizer(towers(1, 2, 0), 1e-9)
    assert _bound(file, cluster_of(1), 1).work == pytest.approx(6e-3 + 8e6 * 1e-9, rel=1e-5)


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_is_faster(seed: int) -> None:
    """Against the best of every plan of a small graph on two devices."""
    random = Random(seed)
    file = random_graph(random, random.randint(1, 3), frozen=seed % 3 == 0)
    file = _with_optimizer(file, random.choice([0.0, 1e-11]))
    devices = 1 if seed % 6 == 5 else 2
    cluster = cluster_of(devices, bandwidth=random.choice([None, 1e9, 1e11]), latency=1e-6)
    batch = random.choice([1, 2, 3, 5, 8])
    bound = _bound(file, cluster, batch)
    best = fastest_ns(file, cluster, batch)
    assert bound.nanoseconds <= best
    assert bound.seconds >= 0


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_no_plan_is_faster_on_larger_graphs(seed: int) -> None:
    random = Random(seed)
    file = random_graph(random, random.randint(3, 4), frozen=seed % 3 == 0)
    file = _with_optimizer(file, random.choice([0.0, 1e-11]))
    devices = random.choice([2, 2, 3])
    cluster = cluster_of(devices, bandwidth=random.choice([None, 1e9, 1e11]))
    batch = random.choice([2, 4, 6])
    assert _bound(file, cluster, batch).nanoseconds <= fastest_ns(file, cluster, batch)


def test_a_single_op_on_a_single_device_reaches_the_bound() -> None:
    file = towers(1, 1, 0)
    cluster = cluster_of(1)
    best = fastest_ns(file, cluster, 4)
    assert _bound(file, cluster, 4).nanoseconds == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("seed", range(200))
def test_no_choice_of_ranks_reduces_faster_than_the_least(seed: int) -> None:
    random = Random(seed)
    sizes = [random.randint(1, 5) for _ in range(random.randint(1, 4))]
    cluster = Cluster(
        devices=tuple(
            Device(kind="d", memory_bytes=1, node=node)
            for node, size in enumerate(sizes)
            for _ in range(size)
        ),
        network=Network(
            intra_node_bandwidth=random.choice([None, 1e10, 3e11]),
            inter_node_bandwidth=random.choice([None, 1e9, 5e10]),
            intra_node_latency=random.choice([0.0, 1e-5]),
            inter_node_latency=random.choice([0.0, 3e-5]),
            devices_per_nic=random.randint(1, 3),
        ),
    )
    for _ in range(5):
        count = random.randint(1, cluster.world_size)
        ranks = tuple(random.sample(range(cluster.world_size), count))
        nbytes = random.choice([1.0, 1e6, 1e9])
        if count < 2:
            continue
        least = min(each * nbytes + fixed for each, fixed in all_reduce_ways(cluster, count))
        assert cluster.all_reduce_seconds(ranks, nbytes) >= least * (1 - 1e-12)


def test_scaling_all_times_scales_the_bound() -> None:
    file = towers(2, 2, 1)
    twice = replace(
        file.costs,
        devices={
            kind: DeviceCosts(2 * item.forward, 2 * item.backward)
            for kind, item in file.costs.devices.items()
        },
    )
    once = _bound(file, cluster_of(3), 8)
    assert lower_bound(file.graph, twice, cluster_of(3), 8).seconds == pytest.approx(
        2 * once.seconds, rel=1e-4
    )


def test_the_gap_is_explained_to_the_last_part() -> None:
    bound = _bound(towers(2, 2, 1), cluster_of(3), 8)
    gap = explain_gap(
        bound,
        0.09,
        [0.06, 0.05, 0.03],
        recompute_seconds=0.006,
        all_reduce_seconds=[0.004, 0.004, 0.0],
        optimizer_seconds=[0.001, 0.001, 0.002],
    )
    parts = (
        gap.efficiency + gap.recompute + gap.all_reduce + gap.optimizer + gap.imbalance + gap.bubble
    )
    assert parts - gap.bound_over_work == pytest.approx(gap.total)
    assert gap.total == pytest.approx(0.09 - bound.seconds)
    assert gap.recompute == pytest.approx(0.002)
    assert gap.bubble == pytest.approx(0.09 - 0.065)


def test_the_gap_of_a_plan_is_its_bubble_and_its_recomputation() -> None:
    """Two layers on two devices, 4 samples: (4 + 1) x 3 ms; the second recomputes, 4 ms each."""
    file = towers(1, 2, 0)
    cluster = cluster_of(2)
    choices = [
        StageChoice(("b0.0",), micro_batch=1, replicas=1, devices=(0,)),
        StageChoice(("b0.1",), micro_batch=1, replicas=1, devices=(1,), recompute=True),
    ]
    plan = assemble(file.graph, file.costs, cluster, choices, batch_size=4)
    bound = _bound(file, cluster, 4)
    gap = plan_gap(plan, bound)
    assert gap.recompute == pytest.approx(4 * MS / 2)
    assert gap.efficiency == pytest.approx(0.0, abs=1e-6)
    # 16 ms and 12 ms of work; the iteration is 1 + 4 x 4 + 2 = 19 ms.
    assert gap.imbalance == pytest.approx(2 * MS)
    assert gap.bubble == pytest.approx(3 * MS)
    assert gap.total == pytest.approx(19 * MS - bound.seconds)
