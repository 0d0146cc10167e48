"""Plans are valid, deterministic, within memory, and as good as what is known of the input."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.cost.published.load import load_graph_file
from graphpipe.cost.table import ParameterMemory
from graphpipe.errors import CostError, InfeasibleError, PlanError
from graphpipe.plan.plan import Plan
from graphpipe.plan.validate import validate
from graphpipe.planner.constraints import Constraints
from graphpipe.planner.search import plan
from tests.planner.synthetic import cluster_of, graph_of, random_graph, towers
from tests.samples import cases_dir


def iteration(found: Plan) -> int:
    assert found.prediction is not None
    return found.prediction.iteration_ns


def bottleneck_ms(found: Plan) -> float:
    """The largest time per sample of a device, milliseconds."""
    loads = [0.0] * found.world_size
    for stage in found.stages:
        for rank in stage.devices:
            times = stage.times[found.cluster.devices[rank].kind]
            per_sample = stage.micro_batch * stage.replicas * found.copies
            loads[rank] += (times.forward_ns + times.backward_ns) / per_sample
    return max(loads) / 1e6


def sample(name: str) -> Path:
    return cases_dir() / "graphs" / f"{name}.json"


def planned(name: str, **options: object) -> Plan:
    file = load_graph_file(sample(name))
    batch = options.pop("batch_size", file.defaults.mini_batch)
    found = plan(
        file.graph, file.costs, file.defaults.cluster(), batch_size=batch, budget=300, **options
    )
    validate(found, file.graph)
    return found


# --- Published hard cases ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stages", "most", "bottleneck"),
    [
        ("c01_equal_30_on_4", 4, 8, 24.0),
        ("c01_equal_38_on_8", 8, 5, 15.0),
        ("c01_equal_42_on_16", 16, 3, 9.0),
        ("c01_equal_5_on_4", 4, 2, 6.0),
        ("c02_heavy_ends_cap70", 4, 14, 15.0),
        ("c02_heavy_ends_cap80", 4, 14, 12.0),
        ("c02_heavy_ends_capnone", 4, 14, 12.0),
        ("c08_zero_cost", 2, 31, 9.0),
    ],
)
def test_balance_rules_where_micro_batches_are_many(
    name: str, stages: int, most: int, bottleneck: float
) -> None:
    """With a bubble of no weight, the best chain is the one with the smallest bottleneck."""
    found = planned(
        name, families=("chain",), copies=1, replicas=False, stages=stages, batch_size=512,
        micro_batches=[4],
    )  # fmt: skip
    assert bottleneck_ms(found) == pytest.approx(bottleneck)
    assert max(len(stage.ops) for stage in found.stages) <= most


@pytest.mark.parametrize(
    ("name", "milliseconds"),
    [
        ("c06_equal_1x4", 12.0),
        ("c06_equal_2x2", 9.0),
        ("c06_equal_4x2", 15.0),
        ("c06_equal_4x8", 33.0),
        ("c06_equal_8x8", 45.0),
        ("c06_two_branches", 27.0),
    ],
)
def test_closed_forms(name: str, milliseconds: float) -> None:
    found = planned(name, copies=1, replicas=False, micro_batches=[1])
    assert iteration(found) <= milliseconds * 1e6 + 0.5
    devices = found.world_size
    if name != "c06_equal_4x2":  # there one device may do two stages' work in the same time
        assert iteration(found) == pytest.approx(milliseconds * 1e6)
        assert len(found.idle_devices) < devices


def test_branches_run_side_by_side() -> None:
    found = planned("c06_two_branches", copies=1, replicas=False, micro_batches=[1])
    assert found.prediction is not None
    assert found.prediction.depth == 2


def test_unequal_stages_meet_their_bound() -> None:
    found = planned("c06_unequal", copies=1, replicas=False, micro_batches=[1])
    assert 99e6 - 1 <= iteration(found) <= 120e6


def test_a_giant_is_replicated() -> None:
    assert 27.5 - 1e-6 <= bottleneck_ms(planned("c02_one_giant")) <= 50.0


def test_the_only_cut_that_fits_is_found() -> None:
    found = planned("c04_tight_unique", copies=1, replicas=False)
    assert [stage.ops for stage in found.stages] == [("n0", "n1"), ("n2", "n3"), ("n4", "n5")]


def test_small_micro_batches_where_only_they_fit() -> None:
    found = planned("c04_small_micro_batch_only", copies=1, replicas=False, recompute=False)
    assert found.stages[0].micro_batch <= 3


def test_a_size_that_cannot_run_is_left_out() -> None:
    found = planned("c04_candidate_crashes")
    assert all(stage.micro_batch != 8 for stage in found.stages if "b" in stage.ops)


@pytest.mark.parametrize(
    ("name", "words"),
    [("c04_one_node_too_big", ("huge", "8.382", "7.451")), ("c04_sum_too_big", ("16.76", "14.9"))],
)
def test_what_cannot_fit_is_named(name: str, words: tuple[str, ...]) -> None:
    file = load_graph_file(sample(name))
    with pytest.raises(InfeasibleError) as error:
        plan(file.graph, file.costs, file.defaults.cluster(), batch_size=8)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("name", "bottleneck"),
    [
        ("c08_all_zero", 0.0),
        ("c08_disconnected", 12.0),
        ("c08_ladder_200", 153.0),
        ("c08_star_200", 154.5),
        ("c08_chain_3000", 1128.0),
    ],
)
def test_unusual_shapes(name: str, bottleneck: float) -> None:
    found = planned(name)
    assert bottleneck_ms(found) <= bottleneck + 1e-6
    ops = sorted(op for stage in found.stages for op in stage.ops)
    assert ops == sorted(op.name for op in load_graph_file(sample(name)).graph.ops)


# --- Properties -------------------------------------------------------------------------


@given(st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_every_plan_is_valid_and_fits(seed: int) -> None:
    random = Random(seed)
    file = random_graph(random, random.randint(1, 9), frozen=random.random() < 0.3)
    devices = random.randint(1, 5)
    room = random.choice([2.0**27, 2.0**40])
    cluster = cluster_of(
        devices,
        per_node=random.choice([1, 2, devices]),
        memory_bytes=room,
        bandwidth=random.choice([None, 1e9]),
    )
    batch = random.choice([1, 3, 8, 12, 16])
    try:
        found = plan(file.graph, file.costs, cluster, batch_size=batch, budget=120)
    except InfeasibleError:
        assert room < 2.0**40, "there is room for everything"
        return
    validate(found, file.graph)
    assert found.prediction is not None
    assert all(peak <= room for peak in found.prediction.peak_memory)
    assert iteration(found) >= found.prediction.lower_bound_ns
    again = plan(file.graph, file.costs, cluster, batch_size=batch, budget=120)
    assert again.to_json() == found.to_json()


@given(st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_an_added_device_does_no_harm(seed: int) -> None:
    random = Random(seed)
    file = random_graph(random, random.randint(2, 8))
    devices = random.randint(1, 6)
    few = plan(file.graph, file.costs, cluster_of(devices), batch_size=16, budget=400)
    more = plan(file.graph, file.costs, cluster_of(devices + 1), batch_size=16, budget=400)
    assert iteration(more) <= 1.02 * iteration(few)


def test_twice_the_cost_is_twice_the_time() -> None:
    one = towers(3, 4, 2, forward_ms=1.0)
    two = towers(3, 4, 2, forward_ms=2.0)
    first = plan(one.graph, one.costs, cluster_of(4), batch_size=32, budget=200)
    second = plan(two.graph, two.costs, cluster_of(4), batch_size=32, budget=200)
    assert iteration(second) == 2 * iteration(first)
    assert [s.ops for s in first.stages] == [s.ops for s in second.stages]


@pytest.mark.parametrize("batch", [8, 64])
def test_never_worse_than_the_chain(batch: int) -> None:
    file = towers(4, 3, 2)
    cluster = cluster_of(6, bandwidth=1e9)
    ours = plan(file.graph, file.costs, cluster, batch_size=batch)
    for family in ("chain", "sequential"):
        chain = plan(file.graph, file.costs, cluster, batch_size=batch, families=(family,))
        validate(chain, file.graph)
        assert iteration(ours) <= iteration(chain)


# --- Options ----------------------------------------------------------------------------


def test_recomputation_is_bought_only_for_memory() -> None:
    file = towers(1, 8, 0)
    options = {"batch_size": 32, "micro_batches": [8], "copies": 1, "replicas": False, "stages": 2}
    roomy = plan(file.graph, file.costs, cluster_of(2), **options)
    assert not any(stage.recompute for stage in roomy.stages)
    # Parameters, gradients and Adam of four layers are 64 MB; the first stage keeps two
    # micro-batches of 32 MB, or with recomputation their inputs and one of 32 MB.
    tight = cluster_of(2, memory_bytes=64e6 + 60e6)
    with pytest.raises(InfeasibleError, match="recompute"):
        plan(file.graph, file.costs, tight, recompute=False, **options)
    found = plan(file.graph, file.costs, tight, **options)
    validate(found, file.graph)
    assert found.stages[0].recompute
    assert not found.stages[1].recompute
    assert all(
        s.recompute for s in plan(file.graph, file.costs, tight, recompute=True, **options).stages
    )


def test_pins_and_groups_hold() -> None:
    file = towers(2, 3, 2)
    demands = Constraints(
        pin={"b0.0": 3, "t.1": 0}, together=[["b1.0", "b1.2"]], micro_batch={"t.0": 4}
    )
    found = plan(file.graph, file.costs, cluster_of(4), batch_size=16, constraints=demands)
    validate(found, file.graph)
    of = {op: stage for stage in found.stages for op in stage.ops}
    assert of["b0.0"].devices[0] == 3
    assert of["t.1"].devices[0] == 0
    assert of["b1.0"] is of["b1.1"] is of["b1.2"]
    assert of["t.0"].micro_batch == 4


@pytest.mark.parametrize(
    ("demands", "word"),
    [
        (Constraints(pin={"nothing": 0}), "nothing"),
        (Constraints(pin={"b0.0": 9}), "rank"),
        (Constraints(pin={"b0": 0, "b0.0": 1}), "b0.0"),
        (Constraints(micro_batch={"b0.0": 0}), "sample"),
    ],
)
def test_wrong_constraints_are_refused(demands: Constraints, word: str) -> None:
    file = graph_of(*_two_modules())
    with pytest.raises(PlanError, match=word):
        plan(file.graph, file.costs, cluster_of(2), batch_size=8, constraints=demands)


def _two_modules() -> tuple[list[object], list[tuple[str, str]]]:
    from graphpipe.cost.published.build import Node

    return [Node("b0", forward=1e-3, backward=1e-3), Node("b0.0", forward=1e-3, backward=1e-3)], [
        ("b0", "b0.0")
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": 8, "micro_batches": [16]},
        {"batch_size": 8, "copies": 9},
        {"batch_size": 8, "replicas": [0]},
        {"batch_size": 8, "families": ["ring"]},
        {"batch_size": 8, "memory_limit": -1},
        {"batch_size": 8, "recompute": "maybe"},
    ],
)
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    file = towers(2, 1, 1)
    with pytest.raises(PlanError):
        plan(file.graph, file.costs, cluster_of(2), **options)


def test_costs_of_another_graph_are_refused() -> None:
    one, two = towers(2, 1, 1), towers(3, 1, 1)
    with pytest.raises(CostError, match="another graph"):
        plan(one.graph, two.costs, cluster_of(2), batch_size=8)


def test_a_stopped_search_says_so() -> None:
    file = towers(4, 6, 3)
    found = plan(file.graph, file.costs, cluster_of(8), batch_size=64, time_limit=0.0)
    validate(found, file.graph)
    assert any("time limit" in note for note in found.notes)


def test_progress_is_told() -> None:
    file = towers(4, 6, 3)
    told: list[tuple[int, float]] = []
    plan(file.graph, file.costs, cluster_of(8), batch_size=64,
         progress=lambda judged, seconds: told.append((judged, seconds)))  # fmt: skip
    assert told
    assert told[-1][1] < float("inf")


def test_memory_limit_counts_like_memory() -> None:
    file = graph_of(*_two_modules(), memory=ParameterMemory(1.0, 0.0, 0.0))
    big = towers(1, 2, 0)
    with pytest.raises(InfeasibleError):
        plan(big.graph, big.costs, cluster_of(2), batch_size=8, memory_limit=1e6)
    assert plan(file.graph, file.costs, cluster_of(2), batch_size=8, memory_limit=1e9)
