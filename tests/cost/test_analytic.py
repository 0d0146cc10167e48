"""The analytic estimate."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from graphpipe.cost.analytic import DEFAULT_MICRO_BATCHES, estimate
from graphpipe.cost.catalogue import device, parse_devices
from graphpipe.cost.cluster import Cluster, Device
from graphpipe.cost.table import CostTable, ParameterMemory
from graphpipe.errors import ClusterError, CostError
from tests.cost.graphs import mlp
from tests.cost.test_catalogue import OWN


def test_times_are_the_roofline_of_each_op() -> None:
    graph, mini = mlp(), parse_devices(OWN)["mini"]
    costs = estimate(graph, mini, micro_batches=[1, 4])
    forward, backward = costs.op_seconds("mini", 4)
    row = graph.op_index
    # linear: 2 * 64 * 4 = 512 FLOP at 50/s + 1 s; 256 + 64 * 4 = 512 bytes at 5/s + 2 s; launch.
    assert forward[row["first"]] == pytest.approx(512 / 5 + 2 + 0.5)
    assert backward[row["first"]] == pytest.approx(1024 / 5 + 2 * 2 + 2 * 0.5)
    assert forward[row["logits"]] == pytest.approx(64 / 5 + 2 + 0.5)
    assert forward[row["view"]] == backward[row["view"]] == 0.0
    assert backward[row["add"]] == 0.0
    for op in graph.ops:
        want = mini.kernel_seconds(
            {"logits": 256.0}.get(op.name, 512.0 if "linear" in op.target else 0.0),
            {"logits": 64.0, "loss": 128.0}.get(op.name, 512.0 if "linear" in op.target else 256.0),
            op.forward.kernels,
            "float32",
        )
        assert forward[row[op.name]] == pytest.approx(want)


def test_a_sample_is_dearer_in_a_small_micro_batch() -> None:
    graph = mlp(1024)
    costs = estimate(graph, "v100-16gb")
    assert costs.micro_batches == DEFAULT_MICRO_BATCHES
    each = [sum(costs.stage_seconds([0, 1, 2], "v100-16gb", b)) / b for b in (1, 4, 16, 64, 256)]
    assert all(after < 0.8 * before for before, after in pairwise(each))
    assert each[0] > 20 * each[-1]


def test_frozen_ops_have_no_backward_and_keep_nothing() -> None:
    graph = mlp()
    costs = estimate(graph, "h100-sxm")
    frozen = graph.op_index["frozen"]
    assert costs.device_costs("h100-sxm").backward[frozen].tolist() == [0.0] * 17
    assert costs.saved[frozen] == ()
    assert costs.gradient_bytes[frozen].tolist() == [0.0, 0.0]
    assert costs.output_bytes[frozen].tolist() == [0.0, 32.0]


def test_each_storage_counts_once() -> None:
    graph = mlp()
    costs = estimate(graph, "h100-sxm")
    first, logits = graph.op_index["first"], graph.op_index["logits"]
    assert costs.saved_bytes([first]) == (0.0, 32.0)
    assert costs.saved_bytes([logits]) == (0.0, 32.0)
    assert costs.saved_bytes([first, logits]) == (0.0, 32.0)
    assert costs.saved_bytes(range(len(graph.ops)))[1] == pytest.approx(32.0 * 3)


def test_what_grows_with_the_square_is_counted_at_the_micro_batch() -> None:
    graph = mlp()
    costs = estimate(graph, "h100-sxm", micro_batches=[1, 1024])
    loss = [graph.op_index["loss"]]
    assert costs.saved_bytes(loss) == (pytest.approx(0.0), pytest.approx(0.0))
    for batch in (2, 16, 1024):
        fixed, per_sample = costs.saved_bytes(loss, batch)
        assert fixed + per_sample * batch == pytest.approx(4 * batch * batch)
    fixed, per_sample = costs.output_bytes[graph.op_index["logits"]]
    assert fixed + per_sample * 1024 == pytest.approx(4 * 1024 * 1024)
    assert fixed + per_sample * 512 >= 4 * 512 * 512


def test_several_kinds_and_a_cluster() -> None:
    graph = mlp()
    devices = (Device(kind="l4", memory_bytes=9), Device(kind="h200", memory_bytes=9))
    both = estimate(graph, Cluster(devices=devices))
    assert set(both.devices) == {"l4", "h200"}
    alone = estimate(graph, device("l4"))
    assert np.array_equal(both.devices["l4"].forward, alone.devices["l4"].forward)
    assert set(estimate(graph, ["l4", device("b200")]).devices) == {"l4", "b200"}
    with pytest.raises(CostError, match=r"no times for this kind.*h200, l4, got 'a100-80gb'"):
        both.op_seconds("a100-80gb", 1)


def test_optimizer() -> None:
    graph = mlp()
    adam, sgd = estimate(graph, "h200"), estimate(graph, "h200", optimizer="sgd")
    assert adam.parameter_memory == ParameterMemory(1.0, 1.0, 2.0)
    assert sgd.parameter_memory == ParameterMemory(1.0, 1.0, 0.0)
    seconds = adam.devices["h200"].optimizer_seconds_per_byte
    assert seconds == pytest.approx(20 / (4.8e12 * 0.85))
    assert sgd.devices["h200"].optimizer_seconds_per_byte < 0.2 * seconds
    # Eight kernels: on a GPU for 36 parameters at once, on a CPU for each.
    assert adam.devices["h200"].optimizer_seconds_per_tensor == pytest.approx(
        8 * device("h200").launch_seconds / 36
    )
    each = estimate(graph, "cpu-core").devices["cpu-core"]
    assert each.optimizer_seconds_per_tensor == 8 * device("cpu-core").launch_seconds
    assert each.optimizer_seconds(1e6, 3) == pytest.approx(
        1e6 * each.optimizer_seconds_per_byte + 3 * each.optimizer_seconds_per_tensor
    )
    own = ParameterMemory(1.0, 1.0, 0.5)
    assert estimate(graph, "h200", parameter_memory=own).parameter_memory == own


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"optimizer": "lbfgs"}, CostError, "Unknown optimizer"),
        ({"precision": "fp8"}, CostError, "Unknown precision"),
        ({"micro_batches": []}, CostError, "must be positive"),
        ({"micro_batches": [0, 1]}, CostError, "must be positive"),
        ({"micro_batches": [2, 1]}, CostError, "ascend"),
        ({"devices": "abacus"}, ClusterError, "Unknown device"),
        ({"devices": []}, CostError, "at least one device"),
        ({"devices": ["l4", "l4"]}, CostError, "each kind once"),
    ],
)
def test_wrong_arguments(change: dict[str, object], error: type[Exception], message: str) -> None:
    arguments: dict[str, object] = {"devices": "l4", **change}
    with pytest.raises(error, match=message):
        estimate(mlp(), arguments.pop("devices"), **arguments)  # type: ignore[arg-type]


def test_a_stale_table_is_refused() -> None:
    costs = estimate(mlp(), "l4")
    costs.check(mlp())
    with pytest.raises(CostError, match="the same ops, but other shapes"):
        costs.check(mlp(16))
    other = mlp()
    shorter = other.model_copy(update={"ops": other.ops[:-1]})
    with pytest.raises(CostError, match="other ops, the first of them 'loss'"):
        costs.check(shorter)


def test_saved_and_loaded_tables_are_equal(tmp_path: Path) -> None:
    costs = estimate(mlp(), ["l4", "h200"], micro_batches=[1, 8])
    costs.save(tmp_path / "costs.json")
    again = CostTable.load(tmp_path / "costs.json")
    again.check(mlp())
    for kind in ("l4", "h200"):
        for size in (1, 5, 8, 64):
            for before, after in zip(
                costs.op_seconds(kind, size), again.op_seconds(kind, size), strict=True
            ):
                assert np.array_equal(before, after)
        assert (
            costs.devices[kind].optimizer_seconds_per_byte
            == again.devices[kind].optimizer_seconds_per_byte
        )
    assert again.saved == costs.saved
    assert again.saved_bytes(range(8), 8) == costs.saved_bytes(range(8), 8)
    assert again.parameter_memory == costs.parameter_memory
