"""Every shape of plan trains as a single process does."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.equality import check
from tests.runtime.manual import Part

CASES: dict[str, tuple[str, list[Part], dict[str, object]]] = {
    "chain": ("chain", [Part("a", 2), Part("b", 2), Part("c", 2), Part("d loss_fn", 2)], {}),
    "diamond": ("diamond", [Part("stem", 2), Part("a", 2), Part("b", 2), Part("cat", 2)], {}),
    "branches of unequal depth": (
        "unequal",
        [
            Part("p", 3), Part("q", 3), Part("r1", 3), Part("r2", 3), Part("r3", 3),
            Part("cat join", 3),
        ],
        {},
    ),
    "skip over stages": ("skip", [Part("a", 3), Part("b", 3), Part("c", 3), Part("add d", 3)], {}),
    "tied embedding and head": (
        "tied", [Part("embedding", 2), Part("middle", 2), Part("head", 2)], {}
    ),
    "frozen branch": ("frozen", [Part("frozen", 2), Part("trained", 2), Part("cat head", 2)], {}),
    "several losses": (
        "several", [Part("body", 3), Part("middle", 3), Part("first", 3), Part("second", 3)], {}
    ),
    "replicas 1, 2, 3": (
        "chain",
        [Part("a", 6), Part("b", 3, replicas=2), Part("c", 3, replicas=3), Part("d", 6)],
        {},
    ),
    "uneven replicas": (
        "chain", [Part("a", 1, replicas=3), Part("b", 4, replicas=2), Part("c d", 8)], {}
    ),
    "one device, two stages": (
        "diamond",
        [Part("stem", 2, (0,)), Part("a", 2, (1,)), Part("b", 2, (2,)), Part("cat", 2, (0,))],
        {},
    ),
    "all stages on one device": (
        "diamond",
        [Part("stem", 2, (0,)), Part("a", 4, (0,)), Part("b", 1, (0,)), Part("cat", 4, (0,))],
        {},
    ),
    "one micro-batch": ("chain", [Part("a", 12), Part("b", 12), Part("c d", 12)], {}),
    "fewer micro-batches than stages": (
        "chain", [Part("a", 6), Part("b", 6), Part("c", 6), Part("d", 6)], {}
    ),
    "micro-batches of many sizes": (
        "diamond", [Part("stem", 1), Part("a", 4), Part("b", 2), Part("cat", 12)], {}
    ),
    "8 to 2 to 8 with a skip": (
        "skip", [Part("a", 8), Part("b", 2), Part("c", 8), Part("add d", 8)], {}
    ),
    "sizes that do not divide the batch": (
        "unequal",
        [Part("p", 5), Part("q", 5), Part("r1", 10), Part("r2 r3", 5), Part("cat join", 5)],
        {},
    ),
    "two copies": (
        "diamond", [Part("stem", 2), Part("a", 6), Part("b", 2), Part("cat", 2)], {"copies": 2}
    ),
    "copies of replicas, tied": (
        "tied", [Part("embedding", 2, replicas=2), Part("middle head", 4)], {"copies": 2}
    ),
    "recomputation": (
        "diamond",
        [
            Part("stem", 2, recompute=True), Part("a", 2, recompute=True), Part("b", 2),
            Part("cat", 2, recompute=True),
        ],
        {},
    ),
    "a tensor without batch dimension": (
        "whole", [Part("matmul", 3), Part("a", 2), Part("matmul_1 b", 6)], {}
    ),
    "int, bool and bf16 tensors": (
        "types", [Part("a", 2), Part("b", 4), Part("table c", 4)], {}
    ),
    "idle devices": ("chain", [Part("a b", 2), Part("c d", 2)], {"world_size": 4}),
    "GPipe": ("chain", [Part("a", 2), Part("b", 2), Part("c d", 2)], {"builder": "gpipe"}),
}  # fmt: skip


SGD_CASES = ("diamond", "tied embedding and head", "replicas 1, 2, 3", "int, bool and bf16 tensors")


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] != "types"])
def test_staged_executor_equals_a_single_process_with_adamw(case: str) -> None:
    name, parts, options = CASES[case]
    check(name, parts, dtype=torch.float64, **options)


@pytest.mark.parametrize("case", SGD_CASES)
def test_staged_executor_equals_a_single_process_with_sgd(case: str) -> None:
    name, parts, options = CASES[case]
    check(name, parts, **options)


PROCESS_CASES = (
    "diamond",
    "tied embedding and head",
    "replicas 1, 2, 3",
    "one device, two stages",
    "two copies",
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in PROCESS_CASES else pytest.mark.long)
        for case in CASES
        if CASES[case][0] != "types"
    ],
)
def test_processes_equal_a_single_process(case: str) -> None:
    name, parts, options = CASES[case]
    check(name, parts, dtype=torch.float64, processes=True, steps=2, **options)


@pytest.mark.parametrize("case", ["one device, two stages", "8 to 2 to 8 with a skip"])
def test_the_order_for_nccl_is_right_on_gloo_too(case: str) -> None:
    name, parts, options = CASES[case]
    order = {"message_order": "global", "overlap": False}
    check(name, parts, dtype=torch.float64, processes=True, steps=2, options=order, **options)


@pytest.mark.parametrize("case", ["one device, two stages", "two copies"])
def test_a_group_for_each_pair_of_ranks_is_right_too(case: str) -> None:
    name, parts, options = CASES[case]
    pairs = {"message_groups": "pairs"}
    check(name, parts, dtype=torch.float64, processes=True, steps=2, options=pairs, **options)
