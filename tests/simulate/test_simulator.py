"""Whole plans: closed forms, copies, all-reduce and optimizer, peaks, both networks."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpipe.cost.cluster import Cluster, Device, Network
from graphpipe.cost.published.load import load_graph_file
from graphpipe.plan.assemble import StageChoice, assemble
from graphpipe.plan.plan import Plan, ReduceGroup
from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec
from graphpipe.plan.stage import StageMemory
from graphpipe.plan.stage_graph import depth
from graphpipe.plan.validate import validate
from graphpipe.simulate.simulator import simulate
from graphpipe.simulate.timeline import Timeline
from tests.plan.plans import cluster_of, plan_of
from tests.plan.random_problems import random_problem
from tests.plan.test_actions import cluster_for
from tests.samples import cases_dir

NET = Network(intra_node_bandwidth=1e9, intra_node_latency=5e-9)


def case_files() -> list[Path]:
    return sorted((cases_dir() / "graphs").glob("c06_*.json"))


@pytest.mark.parametrize("network", ["channel", "shared"])
@pytest.mark.parametrize("builder", ["auto", "gpipe", "list"])
def test_published_cases_take_the_expected_time(network: str, builder: str) -> None:
    """Planner estimate, simulation and the sum over the trace agree."""
    files = case_files()
    assert files
    for path in files:
        case = json.loads(path.read_text())
        loaded = load_graph_file(path)
        plan = assemble(
            loaded.graph,
            loaded.costs,
            loaded.defaults.cluster(),
            [
                StageChoice((op.name,), case["micro_batch"], 1, (rank,))
                for rank, op in enumerate(loaded.graph.ops)
            ],
            batch_size=case["mini_batch"],
            builder=builder,
        )
        validate(plan, loaded.graph)
        timeline = simulate(plan, network=network)  # type: ignore[arg-type]
        found = timeline.iteration_ns / 1e6
        expect = case["expect"]
        if expect["kind"] == "value":
            assert found == expect["iteration_time"], path.name
        else:
            assert expect["lower"] <= found <= expect["upper"], path.name
        assert max(e.end_ns for e in timeline.events) == timeline.iteration_ns
        tasks = case["mini_batch"] // case["micro_batch"]
        per_stage = [round((n["fwd"] + n["bwd"]) * 1e6) * tasks for n in case["nodes"]]
        assert list(timeline.busy_ns) == per_stage
        if "pipeline_depth" in expect:
            assert depth(plan) == expect["pipeline_depth"]


def chain_plan(**options: object) -> Plan:
    stages = (StageSpec(1, 1, 1, 2, (0,), 10, 20), StageSpec(1, 1, 1, 1, (1,), 10, 20))
    problem = PipelineProblem(stages, (EdgeSpec(0, 1, 3.0, 4.0, 2.0),), 2, 2)
    return plan_of(problem, cluster_of(4 if options.get("copies") else 2, NET), **options)  # type: ignore[arg-type]


def test_a_timeline_by_hand() -> None:
    timeline = simulate(chain_plan(), network="channel")
    assert [
        (e.rank, f"{e.kind}{e.stage}.{e.micro_batch}", e.start_ns, e.end_ns)
        for e in timeline.events
    ] == [
        (0, "F0.0", 0, 10),
        (0, "F0.1", 10, 20),
        (0, "B0.0", 59, 79),
        (0, "B0.1", 89, 109),
        (1, "F1.0", 22, 32),
        (1, "B1.0", 32, 52),
        (1, "F1.1", 52, 62),
        (1, "B1.1", 62, 82),
    ]
    assert [
        (t.kind, t.source, t.target, t.start_ns, t.end_ns, t.nbytes, t.first_sample, t.last_sample)
        for t in timeline.transfers
    ] == [
        ("F", 0, 1, 10, 22, 7, 0, 0),
        ("F", 0, 1, 20, 32, 7, 1, 1),
        ("B", 1, 0, 52, 59, 2, 0, 0),
        ("B", 1, 0, 82, 89, 2, 1, 1),
    ]
    assert timeline.iteration_ns == 109
    assert timeline.peak_in_flight == (2, 1)
    assert timeline.stage_names == ("s0", "s1")
    assert timeline.bubble == pytest.approx(1 - 120 / 218)
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_all_reduce_waits_for_its_ranks_and_their_cards_then_the_optimizer_runs() -> None:
    groups = (
        ReduceGroup(ranks=(0, 2), parameters=("a",), nbytes=100),
        ReduceGroup(ranks=(0, 1), parameters=("b",), nbytes=10),
    )
    plan = chain_plan(copies=2, reduce_groups=groups, optimizer_ns=(5, 6, 7, 0))
    timeline = simulate(plan, network="channel")
    after = [(e.rank, e.kind, e.start_ns, e.end_ns) for e in timeline.events if e.stage < 0]
    # A ring of two: all bytes once at 1 byte a nanosecond, and twice the latency.
    assert after == [
        (0, "all_reduce", 109, 219),
        (0, "all_reduce", 219, 239),
        (0, "optimizer", 239, 244),
        (1, "all_reduce", 219, 239),
        (1, "optimizer", 239, 245),
        (2, "all_reduce", 109, 219),
        (2, "optimizer", 219, 226),
    ]
    assert timeline.iteration_ns == 245


def test_copies_run_side_by_side_on_their_own_samples() -> None:
    timeline = simulate(chain_plan(copies=2), network="shared")
    one = simulate(chain_plan(), network="shared")
    assert timeline.iteration_ns == one.iteration_ns
    assert {t.first_sample for t in timeline.transfers if t.source >= 2} == {2, 3}
    assert timeline.peak_in_flight == (2, 1)


def test_evaluation_has_forwards_only() -> None:
    groups = (ReduceGroup(ranks=(0, 1), parameters=("b",), nbytes=10),)
    timeline = simulate(chain_plan(reduce_groups=groups, optimizer_ns=(5, 5)), training=False)
    assert {e.kind for e in timeline.events} == {"F"}
    assert {t.kind for t in timeline.transfers} == {"F"}


def test_other_batch_sizes() -> None:
    short = simulate(chain_plan(), batch_size=1)
    assert sum(e.kind == "F" for e in short.events) == 2
    assert simulate(chain_plan(), batch_size=5).iteration_ns > short.iteration_ns


@given(seed=st.integers(0, 10**6), copies=st.integers(1, 2))
@settings(max_examples=60, deadline=None)
def test_timelines_obey_the_plan(seed: int, copies: int) -> None:
    problem = random_problem(seed)
    plan = plan_of(
        problem,
        cluster_for(problem.world_size * copies, seed),
        copies=copies,
        memory=StageMemory(parameters=10, saved_per_micro_batch=3, workspace=1),
    )
    for network in ("channel", "shared"):
        timeline = simulate(plan, network=network)  # type: ignore[arg-type]
        tasks = sum(len(line) for line in plan.schedule.tasks)
        assert len(timeline.events) == tasks
        for rank, line in enumerate(plan.schedule.tasks):
            own = [e for e in timeline.events if e.rank == rank]
            ran = sorted(own, key=lambda e: (e.start_ns, e.end_ns))
            assert len(ran) == len(line)
            for before, after in pairwise(ran):
                assert before.end_ns <= after.start_ns
        ends = {(e.kind, e.stage, e.micro_batch, e.rank): e for e in timeline.events}
        for t in timeline.transfers:
            edge = plan.edges[t.edge]
            near, far = (edge.source, edge.target) if t.kind == "F" else (edge.target, edge.source)
            first = [e for (k, s, _, r), e in ends.items() if (k, s, r) == (t.kind, near, t.source)]
            assert any(e.end_ns <= t.start_ns for e in first)
            last = [e for (k, s, _, r), e in ends.items() if (k, s, r) == (t.kind, far, t.target)]
            assert any(e.start_ns >= t.end_ns for e in last)
        for stage, peak in zip(plan.stages, timeline.peak_in_flight, strict=True):
            unit = stage.replicas * stage.micro_batch
            if stage.has_backward:
                assert peak <= max(unit, -(-stage.in_flight // unit) * unit)
        assert all(
            peak >= plan.static_bytes(rank) for rank, peak in enumerate(timeline.peak_memory)
        )
        assert simulate(plan, network=network) == timeline  # type: ignore[arg-type]


def test_a_cluster_may_have_idle_ranks() -> None:
    cluster = Cluster(devices=tuple(Device(kind="toy", memory_bytes=1) for _ in range(5)))
    stages = (StageSpec(1, 1, 1, 2, (3,), 10, 20),)
    plan = plan_of(PipelineProblem(stages, (), 2, 5), cluster)
    assert simulate(plan).busy_ns == (0, 0, 0, 60, 0)
    assert simulate(plan).bubble == 0
