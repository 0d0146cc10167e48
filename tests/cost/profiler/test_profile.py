"""``profile``: a whole graph."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from graphpipe.cost.analytic import estimate
from graphpipe.cost.cluster import Cluster, Device
from graphpipe.cost.profiler import measure, profile
from graphpipe.cost.profiler.facts import OpFacts
from graphpipe.cost.profiler.measure import Budget, Meter, OpMeasurement
from graphpipe.cost.table import CostTable
from graphpipe.errors import CostError
from graphpipe.graph.capture import capture
from graphpipe.planner.search import plan
from tests.cost.profiler.model import hard_graph

QUICK = Budget(0.0, 2, 2)


@pytest.fixture(scope="module")
def costs() -> CostTable:
    return profile(hard_graph(), micro_batches=[2, 4, 8], budget=QUICK, correction_seconds=0.3)


def test_the_table_is_complete(costs: CostTable) -> None:
    graph = hard_graph()
    costs.check(graph)
    assert costs.source == "profiled"
    assert costs.micro_batches == (2, 4, 8)
    assert costs.torch_version == torch.__version__
    assert set(costs.hosts) == set(costs.devices) == set(costs.corrections) == {"cpu-core"}
    times = costs.devices["cpu-core"]
    assert times.optimizer_seconds_per_byte >= 0  # beyond one addition of tiny gradients
    assert times.optimizer_seconds_per_tensor > 0
    for i, op in enumerate(graph.ops):
        free = op.target == "getitem"
        assert (times.forward[i] > 0).all() != free
        if not op.requires_grad or free:
            assert (times.backward[i] == 0).all()
        elif "linear" in op.target:
            assert (times.backward[i] > 0).all()
    assert costs.spreads["cpu-core"][0].shape == times.forward.shape
    assert any("corrected by" in note for note in costs.notes)


def test_equal_ops_have_equal_times(costs: CostTable) -> None:
    graph = hard_graph()
    first, second = (graph.op_index[op.name] for op in graph.ops if "twins" in op.module)
    assert np.array_equal(
        costs.devices["cpu-core"].forward[first], costs.devices["cpu-core"].forward[second]
    )


def test_saved_bytes_equal_those_of_the_capture(costs: CostTable) -> None:
    graph = hard_graph()
    expected = estimate(graph, "cpu-core")
    everything = range(len(graph.ops))
    # The bag's kernel on a CPU keeps less than its description says.
    assert costs.saved_bytes(everything) == pytest.approx(
        expected.saved_bytes(everything), rel=0.02
    )
    for i in everything:
        if "embedding_bag" not in graph.ops[i].target:
            assert costs.saved_bytes([i]) == pytest.approx(expected.saved_bytes([i]))
    assert costs.output_bytes == pytest.approx(expected.output_bytes)
    assert costs.gradient_bytes == pytest.approx(expected.gradient_bytes)


def test_saved_bytes_are_those_that_hooks_count(costs: CostTable) -> None:
    graph = hard_graph()
    program = graph.program
    assert program is not None
    kept: dict[int, int] = {}
    free = {value.untyped_storage()._cdata for value in program.state.values()}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in free:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    inputs = (torch.randint(0, 50, (6, 7)), torch.randn(6, 16, 5), torch.randint(0, 16, (6,)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        program.module(6, *inputs)
    fixed, per_sample = costs.saved_bytes(range(len(graph.ops)))
    assert fixed + 6 * per_sample == pytest.approx(sum(kept.values()))


def test_saved_and_loaded(costs: CostTable, tmp_path: Path) -> None:
    costs.save(tmp_path / "costs.json")
    again = CostTable.load(tmp_path / "costs.json")
    again.check(hard_graph())
    assert again.stage_seconds([4, 5], "cpu-core", 3) == costs.stage_seconds([4, 5], "cpu-core", 3)


def test_progress_and_kind() -> None:
    seen: list[tuple[int, int, str]] = []
    costs = profile(
        hard_graph(),
        micro_batches=[2],
        kind="my-cpu",
        budget=QUICK,
        correction_seconds=0,
        progress=lambda done, total, what: seen.append((done, total, what)),
    )
    assert set(costs.devices) == {"my-cpu"}
    total = seen[0][1]
    assert [done for done, _, _ in seen] == list(range(total + 1))
    # In two rounds; far fewer than the ops, since equal ones are measured once.
    assert total / 2 < len(hard_graph().ops)
    assert costs.corrections["my-cpu"] == (1.0, 1.0)


def test_an_op_that_runs_out_of_memory_is_left_out_at_that_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Meter.measure

    def measure_with_limit(self: Meter, facts: OpFacts) -> OpMeasurement:
        if "conv1d" in facts.op.target and facts.tensors[0].shape[0] >= 4:
            raise torch.OutOfMemoryError("out of memory")
        return real(self, facts)

    monkeypatch.setattr(measure.Meter, "measure", measure_with_limit)
    graph = hard_graph()
    costs = profile(graph, micro_batches=[2, 4, 8], budget=QUICK, correction_seconds=0.05)
    row = next(i for i, op in enumerate(graph.ops) if "conv1d" in op.target)
    assert np.isinf(costs.devices["cpu-core"].forward[row]).tolist() == [False, True, True]
    assert [item.micro_batch for item in costs.exclusions] == [4, 8]
    assert costs.exclusions[0].op == graph.ops[row].name
    assert "conv1d" in costs.notes[0]
    assert "4 samples" in costs.notes[0]
    assert np.isfinite(costs.stage_seconds([row], "cpu-core", 2)[0])
    assert costs.stage_seconds([row], "cpu-core", 3)[0] == np.inf
    # The search goes on without these sizes.
    cluster = Cluster(devices=(Device(kind="cpu-core", memory_bytes=2**30),) * 2)
    found = plan(graph, costs, cluster, batch_size=8)
    stage = next(item for item in found.stages if graph.ops[row].name in item.ops)
    assert stage.micro_batch <= 2


def test_an_op_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Meter, facts: OpFacts) -> OpMeasurement:
        raise IndexError("index out of range")

    monkeypatch.setattr(measure.Meter, "measure", fail)
    with pytest.raises(CostError, match=r"IndexError: index out of range.*op '.*opaque"):
        profile(hard_graph(), micro_batches=[2], budget=QUICK)


@pytest.mark.parametrize("sizes", [[], [0], [4, 2], [2, 2]])
def test_wrong_sizes(sizes: list[int]) -> None:
    with pytest.raises(CostError, match="must be positive and ascend"):
        profile(hard_graph(), micro_batches=sizes)


def test_autocast_is_measured_as_such() -> None:
    graph = hard_graph()
    plain = profile(graph, micro_batches=[4], budget=QUICK, correction_seconds=0)
    mixed = profile(
        graph, micro_batches=[4], budget=QUICK, correction_seconds=0, precision="bf16-mixed"
    )
    row = next(i for i, op in enumerate(graph.ops) if op.module == "twins.0")
    assert mixed.output_bytes[row, 1] == plain.output_bytes[row, 1] / 2
    assert mixed.parameter_memory == plain.parameter_memory


def test_a_model_on_the_meta_device_is_measured_and_stays_there() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        x, y = torch.randn(4, 8), torch.randn(4, 4)
    graph = capture(model, (x,), targets=y, loss_fn=lambda out, want: ((out - want) ** 2).mean())
    costs = profile(graph, micro_batches=[2, 4], budget=QUICK, correction_seconds=0)
    forward, backward = costs.op_seconds("cpu-core", 4)
    assert forward[0] > 0
    assert backward[0] > 0
    assert all(value.is_meta for value in model.parameters())


def test_autocast_inside_the_model_is_measured_under_it() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(30, 8)
            self.inner = nn.Linear(8, 8)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            x = self.embedding(words)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = torch.relu(self.inner(x))
            return y.float()

    words, target = torch.randint(0, 30, (4, 6)), torch.randn(4, 6, 8)
    graph = capture(
        Mixed(), (words,), targets=target, loss_fn=lambda out, want: ((out - want) ** 2).mean()
    )
    costs = profile(graph, micro_batches=[2, 4], budget=QUICK, correction_seconds=0)
    row = next(i for i, op in enumerate(graph.ops) if op.module == "inner")
    assert graph.ops[row].output is not None
    assert graph.ops[row].output.dtype == "bfloat16"
    assert costs.output_bytes[row, 1] == 6 * 8 * 2
    forward, backward = costs.op_seconds("cpu-core", 4)
    assert forward[row] > 0
    assert backward[row] > 0


def test_an_opaque_module_is_measured_whole() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), Twice(), nn.Linear(8, 4))
        x, y = torch.randn(4, 8), torch.randn(4, 4)
    graph = capture(
        model,
        (x,),
        targets=y,
        loss_fn=lambda out, want: ((out - want) ** 2).mean(),
        opaque={"1": lambda x: x.new_empty(x.shape)},
    )
    costs = profile(graph, micro_batches=[2, 4], budget=QUICK, correction_seconds=0)
    opaque = next(i for i, op in enumerate(graph.ops) if op.module == "1")
    forward, backward = costs.op_seconds("cpu-core", 4)
    assert forward[opaque] > 0
    assert backward[opaque] > 0
    assert all(value.is_meta for value in model.parameters())


def test_two_tables_of_one_machine_differ_only_in_time(costs: CostTable) -> None:
    again = profile(hard_graph(), micro_batches=[2, 4, 8], budget=QUICK, correction_seconds=0)
    assert again.fingerprint == costs.fingerprint
    assert again.saved == costs.saved
    assert np.array_equal(again.storages, costs.storages)
    assert dataclasses.replace(again, notes=()).hosts == costs.hosts
