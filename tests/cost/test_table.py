"""``CostTable``: looking up times and bytes, and what a table must fulfil."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from graphpipe.cost.table import CostTable, DeviceCosts, Exclusion, ParameterMemory
from graphpipe.errors import CostError
from tests.cost.graphs import mlp


def table(**changes: object) -> CostTable:
    """Two ops, sizes 2, 4 and 8, one storage shared by both and one that grows squared."""
    base = CostTable(
        fingerprint="f",
        source="profiled",
        ops=("a", "b"),
        micro_batches=(2, 4, 8),
        devices={
            "x": DeviceCosts(
                np.array([[1.0, 2.0, 6.0], [1.0, 1.0, 1.0]]), np.array([[2.0, 3.0, 8.0], [0.0] * 3])
            )
        },
        output_bytes=np.array([[0.0, 4.0], [8.0, 0.0]]),
        gradient_bytes=np.zeros((2, 2)),
        storages=np.array([[1.0, 10.0], [0.0, 0.0]]),
        saved=((0,), (0, 1)),
        workspace_bytes=np.zeros((2, 2)),
        storage_squares=np.array([0.0, 3.0]),
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("micro_batch", "forward", "backward"),
    [
        (1, [1.0, 1.0], [2.0, 0.0]),  # below the first size: the first
        (2, [1.0, 1.0], [2.0, 0.0]),
        (3, [1.5, 1.0], [2.5, 0.0]),
        (4, [2.0, 1.0], [3.0, 0.0]),
        (5, [3.0, 1.0], [4.25, 0.0]),
        (8, [6.0, 1.0], [8.0, 0.0]),
        (16, [12.0, 2.0], [16.0, 0.0]),  # above the last: in proportion
    ],
)
def test_times_between_sizes(micro_batch: int, forward: list[float], backward: list[float]) -> None:
    got = table().op_seconds("x", micro_batch)
    assert got[0].tolist() == pytest.approx(forward)
    assert got[1].tolist() == pytest.approx(backward)


def test_corrections_apply_to_stages() -> None:
    costs = table(corrections={"x": (0.5, 2.0)})
    assert costs.stage_seconds([0, 1], "x", 4) == (pytest.approx(1.5), pytest.approx(6.0))
    assert table().stage_seconds([0, 1], "x", 4) == (pytest.approx(3.0), pytest.approx(3.0))


def test_exclusions_are_infinite_at_their_size_only() -> None:
    costs = table(exclusions=(Exclusion("b", 3, "out of memory"),))
    assert np.isinf(costs.op_seconds("x", 3)[0]).tolist() == [False, True]
    assert np.isfinite(costs.op_seconds("x", 4)[0]).all()
    assert costs.stage_seconds([0], "x", 3)[0] == 1.5


def test_a_measured_inf_spreads_to_neighbouring_sizes_and_makes_no_nan() -> None:
    forward = np.array([[1.0, np.inf, 2.0], [1.0, 1.0, np.inf]])
    devices = {"x": DeviceCosts(forward, np.zeros((2, 3)))}
    with pytest.raises(CostError, match=r"no exclusion says why.*op 'a'"):
        table(devices=devices)
    why = (Exclusion("a", 4, "out of memory"), Exclusion("b", 8, "out of memory"))
    costs = table(devices=devices, exclusions=why)
    assert costs.op_seconds("x", 2)[0].tolist() == [1.0, 1.0]
    assert costs.op_seconds("x", 3)[0].tolist() == [np.inf, 1.0]
    assert costs.op_seconds("x", 8)[0].tolist() == [2.0, np.inf]
    assert costs.op_seconds("x", 99)[0][1] == np.inf


def test_storages_count_once_and_squares_at_the_given_size() -> None:
    costs = table()
    assert costs.saved_bytes([0]) == (1.0, 10.0)
    assert costs.saved_bytes([0, 1]) == (1.0, 10.0)
    assert costs.saved_bytes([0, 1], 5) == (1.0, 10.0 + 15.0)
    assert costs.saved_bytes([]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ops": ("a", "a")}, "ops"),
        ({"ops": ()}, "ops"),
        ({"micro_batches": (2, 2, 8)}, "micro_batches"),
        ({"micro_batches": (0, 2, 8)}, "micro_batches"),
        ({"micro_batches": ()}, "micro_batches"),
        ({"devices": {}}, "devices"),
        ({"saved": ((0,),)}, "saved"),
        ({"saved": ((0,), (2,))}, "saved"),
        ({"saved": ((0,), (-1,))}, "saved"),
        ({"exclusions": (Exclusion("c", 1, "?"),)}, "exclusions"),
        ({"output_bytes": np.zeros((2, 3))}, "output_bytes"),
        ({"output_bytes": np.full((2, 2), np.nan)}, "output_bytes"),
        ({"storages": np.full((2, 2), np.inf)}, "storages"),
        ({"storage_squares": np.zeros(3)}, "storage_squares"),
        ({"devices": {"x": DeviceCosts(np.zeros((2, 2)), np.zeros((2, 3)))}}, "devices.x.forward"),
        (
            {"devices": {"x": DeviceCosts(np.zeros((2, 3)), np.full((2, 3), -1.0))}},
            "devices.x.backward",
        ),
        (
            {"devices": {"x": DeviceCosts(np.full((2, 3), np.nan), np.zeros((2, 3)))}},
            "devices.x.forward",
        ),
        (
            {"devices": {"x": DeviceCosts(np.zeros((2, 3)), np.zeros((2, 3)), -1.0)}},
            "optimizer_seconds_per_byte",
        ),
    ],
)
def test_tables_that_do_not_hold_together_are_refused(
    changes: dict[str, object], field: str
) -> None:
    with pytest.raises(CostError, match=field):
        table(**changes)


def test_a_measurement_of_another_torch_is_stale() -> None:
    graph = mlp().model_copy(update={"torch_version": "2.13.0"})
    costs = table(
        fingerprint=graph.fingerprint, ops=tuple(op.name for op in graph.ops)[:2], torch_version=""
    )
    costs.check(graph)
    with pytest.raises(CostError, match=r"another version of torch.*2\.13\.0.*2\.14\.0"):
        dataclasses.replace(costs, torch_version="2.14.0").check(graph)


def test_parameter_memory_of_optimizers() -> None:
    assert ParameterMemory.for_optimizer("sgd") == ParameterMemory(1.0, 1.0, 0.0)
    assert ParameterMemory.for_optimizer("adam", "bf16-mixed") == ParameterMemory(1.0, 1.0, 2.0)
    with pytest.raises(CostError, match="Unknown optimizer"):
        ParameterMemory.for_optimizer("lion")
    with pytest.raises(CostError, match="Unknown precision"):
        ParameterMemory.for_optimizer("sgd", "int4")
