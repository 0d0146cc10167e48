"""Ops of an autocast region, one by one."""

from __future__ import annotations

import torch
from torch import fx

from graphpipe.graph.autocast import call_under_autocast, operator_of

aten = torch.ops.aten


def test_an_op_is_seen_through_its_region() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    plain = graph.call_function(aten.add.Tensor, (x, x), {"alpha": 2})
    inside = graph.call_function(
        call_under_autocast,
        ("cpu", torch.bfloat16, True, aten.add.Tensor, x, x),
        {"alpha": 2},
    )
    assert operator_of(inside) == operator_of(plain) == (aten.add.Tensor, (x, x), {"alpha": 2})
    assert operator_of(x)[0] == "x"


def test_a_region_casts_its_op_and_restores_what_was_around_it() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.float16):
        inside = call_under_autocast("cpu", torch.bfloat16, True, aten.mm.default, x, x)
        after = x @ x
    assert (inside.dtype, after.dtype) == (torch.bfloat16, torch.float16)
    assert call_under_autocast("cpu", None, False, aten.mm.default, x, x).dtype is torch.float32
