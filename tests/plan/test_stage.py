"""Records of stages."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from graphpipe.plan.stage import EdgeTensor, Stage, StageEdge, StageMemory


def stage(**fields: object) -> Stage:
    return Stage(
        **{"name": "s", "ops": ("a",), "micro_batch": 2, "in_flight": 12, "devices": (5, 3, 1, 4),
           "replicas": 2, "block": 3, **fields}  # type: ignore[arg-type]
    )  # fmt: skip


def test_quantum_and_devices() -> None:
    assert stage().quantum == 12
    assert [stage().device_of(copy, i) for copy in (0, 1) for i in (0, 1, 2)] == [5, 3, 5, 1, 4, 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"devices": (1, 1)}, "lists a device twice"),
        ({"devices": (1, 2, 3)}, "3 devices for 2 replicas"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"ops": ()}, "ops"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        stage(**fields)


def test_static_memory() -> None:
    assert StageMemory(parameters=1, gradients=2, optimizer=4, workspace=8).static == 7


def test_an_edge_has_a_gradient_if_one_of_its_tensors_has() -> None:
    mask = EdgeTensor(name="m", has_gradient=False)
    assert not StageEdge(source=0, target=1, tensors=(mask,)).has_gradient
    assert StageEdge(source=0, target=1, tensors=(mask, EdgeTensor(name="x"))).has_gradient
    with pytest.raises(ValidationError, match="bytes_per_sample"):
        EdgeTensor(name="x", bytes_per_sample=1e300)
