"""Measuring one op."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphpipe.cost.profiler.evict import Evictor
from graphpipe.cost.profiler.facts import OpFacts, facts_at
from graphpipe.cost.profiler.measure import (
    Budget,
    Meter,
    OpMeasurement,
    Saved,
    extrapolated,
)
from graphpipe.cost.profiler.timing import Timing
from tests.cost.profiler.model import hard_graph

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def meter() -> Meter:
    return Meter(CPU, Evictor(hard_graph(), CPU), Budget(0.0, 2, 2))


@pytest.fixture(scope="module")
def facts() -> dict[str, OpFacts]:
    return facts_at(hard_graph(), 4)


def _named(facts: dict[str, OpFacts], target: str) -> OpFacts:
    return next(item for item in facts.values() if item.op.target.startswith(f"aten.{target}"))


def test_forward_and_backward_take_time(meter: Meter, facts: dict[str, OpFacts]) -> None:
    measured = meter.measure(_named(facts, "conv1d"))
    assert measured.forward.seconds > 0
    assert measured.backward.seconds > 0
    assert measured.workspace == -1


def test_an_op_without_gradient_has_no_backward(meter: Meter, facts: dict[str, OpFacts]) -> None:
    frozen = next(item for item in facts.values() if item.op.module == "frozen")
    measured = meter.measure(frozen)
    assert measured.backward.seconds == 0.0
    assert measured.saved == ()


@pytest.mark.parametrize(
    ("target", "saved"),
    [
        # relu in place keeps its result, which is its argument's memory.
        ("relu_", {("input", 0)}),
        ("tanh", {("output", 0)}),
        ("conv1d", {("input", 0)}),
        ("batch_norm", {("input", 0), ("internal", 0), ("internal", 1)}),
        ("add.Tensor", set()),
    ],
)
def test_what_is_kept(
    meter: Meter, facts: dict[str, OpFacts], target: str, saved: set[tuple[str, int]]
) -> None:
    found = meter.measure(_named(facts, target)).saved
    if target == "batch_norm":  # which of its own come first is its own business
        assert sorted(item.kind for item in found) == sorted(kind for kind, _ in saved)
        assert sorted(item.nbytes for item in found if item.kind == "internal") == [64, 64]
    else:
        assert {(item.kind, item.index) for item in found} == saved


def _taken(forward: float, backward: float) -> OpMeasurement:
    return OpMeasurement(Timing(forward, 0.0), Timing(backward, 0.0), (Saved("internal", 0, 100),))


@pytest.mark.parametrize(
    ("before", "grown"),
    [
        ([(2, _taken(0.2, 0.4)), (4, _taken(0.4, 0.8))], True),
        ([(2, _taken(0.2, 0.4)), (4, _taken(0.41, 0.79))], True),
        ([(2, _taken(0.3, 0.4)), (4, _taken(0.4, 0.8))], False),  # not in proportion
        ([(2, _taken(0.05, 0.1)), (4, _taken(0.1, 0.2))], False),  # short enough to measure
        ([(4, _taken(0.4, 0.8))], False),  # one size says nothing of growth
        ([], False),
    ],
)
def test_only_long_ops_in_proportion_are_extrapolated(
    before: list[tuple[int, OpMeasurement]], grown: bool
) -> None:
    found = extrapolated(8, before, Budget(long=0.3, longest=1.0))
    assert (found is not None) == grown
    if found is not None:
        assert found.forward.seconds == pytest.approx(2 * before[-1][1].forward.seconds)
        assert found.saved == (Saved("internal", 0, 200),)
        assert found.workspace == -1


@pytest.mark.parametrize(
    ("state_bytes", "seconds", "grown"),
    [
        (10**6, 1.2, True),  # 0.8 ms of 1.2 s at most
        (10**8, 1.2, False),  # its weights may take 80 ms, whatever the micro-batch
        (10**6, 0.9, False),  # short enough to measure the next size too
    ],
)
def test_a_very_long_op_is_extrapolated_from_one_size(
    state_bytes: int, seconds: float, grown: bool
) -> None:
    before = [(4, _taken(seconds / 3, seconds * 2 / 3))]
    found = extrapolated(8, before, Budget(long=0.3, longest=1.0), state_bytes)
    assert (found is not None) == grown
    if found is not None:
        assert found.backward.seconds == pytest.approx(seconds * 4 / 3)


def test_repeats_shrink_with_the_time_of_an_op() -> None:
    budget = Budget(seconds=0.01, most=6, least=2, long=0.1, longest=1.0)
    assert [budget.repeats(s) for s in (1e-6, 0.002, 0.05, 0.2, 1.5)] == [6, 5, 2, 1, 0]


def test_a_second_round_is_merged_with_the_first(meter: Meter, facts: dict[str, OpFacts]) -> None:
    one = _named(facts, "conv1d")
    first = meter.measure(one)
    both = meter.again(one, first)
    assert both.forward.seconds <= first.forward.seconds
    assert both.backward.seconds <= first.backward.seconds
    assert both.saved == first.saved


def test_the_peak_of_a_gpu_is_its_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda d: seen.append(str(d)))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda d: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda d: 170)
    on_gpu = object.__new__(Meter)  # a whole one would measure on the device
    on_gpu.device = torch.device("cuda", 0)
    assert (on_gpu._reset_peak(), on_gpu._peak()) == (100, 170)
    assert seen == ["cuda:0"]


def test_gradient_sums(meter: Meter) -> None:
    assert meter.add((1000,), torch.float32).seconds > 0
    assert meter.accumulate((1000,), torch.float32).seconds > 0


def test_a_cpu_refuses_beforehand_what_does_not_fit(
    meter: Meter, facts: dict[str, OpFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 1)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        meter.measure(_named(facts, "conv1d"))


def test_eviction_grows_with_the_model() -> None:
    small = Evictor(hard_graph(), CPU)
    assert small.nbytes == 0
    small.evict()
    weight = hard_graph().parameters[0].model_copy(update={"shape": (2**20, 2)})
    large = Evictor(hard_graph().model_copy(update={"parameters": (weight,)}), CPU)
    assert large.nbytes == 8 * 2**20
    large.evict()
    large.touch([nn.Parameter(torch.ones(3)), torch.ones(3, dtype=torch.bool)])


def test_records_are_plain_values() -> None:
    one, other = OpMeasurement.__dataclass_fields__, Saved("input", 0)
    assert set(one) == {"forward", "backward", "saved", "workspace"}
    assert other == Saved("input", 0, 0)
