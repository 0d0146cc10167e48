"""Plans as tables."""

from __future__ import annotations

from graphpipe.plan.plan import Plan, Prediction
from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec
from graphpipe.plan.stage import StageMemory
from graphpipe.plan.text import ranks_text, shorten
from tests.plan.plans import plan_of

PROBLEM = PipelineProblem(
    (
        StageSpec(1, 2, 1, 4, (0, 1), 1_500_000, 0, False),
        StageSpec(2, 1, 1, 2, (2,), 2_000_000, 4_000_000),
    ),
    (EdgeSpec(0, 1, 2048.0, 16.0, has_gradient=False),),
    8,
    4,
)


def plan(**fields: object) -> Plan:
    made = plan_of(PROBLEM, memory=StageMemory(parameters=3 * 2**20))
    return Plan(**{**dict(made), **fields})


def test_a_plan_that_was_not_simulated() -> None:
    text = str(plan(model="towers", planner="gpp", notes=("look here",)))
    lines = text.splitlines()
    assert lines[0] == (
        "Plan for towers by gpp: 2 stages on 3 of 4 devices, mini-batch 8 samples, schedule kfkb"
    )
    assert lines[1] == "Not simulated; depth 2"
    assert lines[5].split() == ["0", "s0", "1", "op", "0-1", "1", "2", "1", "4", "1.5", "ms",
                                "none", "about", "3", "MiB"]  # fmt: skip
    assert "0 -> 1  s0 -> s1  2 KiB + 16 B a micro-batch  none" in text
    assert lines[-3:] == [
        "Most compute: device 2 with 's1', 3 ms a sample",
        "Idle devices: 3",
        "Note: look here",
    ]


def test_a_simulated_plan_shows_time_memory_and_the_gap() -> None:
    prediction = Prediction(
        iteration_ns=20_000_000, bubble=0.25, depth=2, all_reduce_ns=3_000, optimizer_ns=400,
        peak_memory=(1, 2, 500_000, 0), lower_bound_ns=16_000_000,
    )  # fmt: skip
    text = str(plan(prediction=prediction))
    assert (
        "Iteration 20 ms (400.0 samples/s), depth 2, bubble 25.0%, all-reduce 3 µs, "
        "optimizer 400 ns\n"
        "No plan can be faster than 16 ms: gap 25.0%"
    ) in text
    assert "488 KiB of 977 KiB (50%)" in text


def test_shared_devices_are_named() -> None:
    shared = PipelineProblem(
        tuple(s._replace(devices=(0,), replicas=1) for s in PROBLEM.stages), PROBLEM.edges, 8, 1
    )
    assert "Devices with several stages: 0" in str(plan_of(shared))
    assert "Most compute: device 0 with 's0' and 's1'" in str(plan_of(shared))


def test_ranks_and_long_names() -> None:
    assert ranks_text((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"
    assert ranks_text(()) == ""
    assert shorten("x" * 100) == "x" * 20 + "..." + "x" * 20
