"""``torch.autocast`` regions inside a model, op by op.

An export gathers such a region into one sub-graph; kept so, a model that is autocast from
within would be a single op. Instead each op of the region is called under the region's
autocast, so that a partition may cut through it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def call_under_autocast(
    device_type: str,
    dtype: torch.dtype | None,
    enabled: bool,
    target: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``target(*args, **kwargs)`` under ``torch.autocast(device_type, dtype, enabled)``."""
    # The cache of casted weights belongs to the autocast around the whole step; a region of
    # one op has nothing to reuse.
    with torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False):
        return target(*args, **kwargs)


def operator_of(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Target and arguments of a node, seen through an autocast region."""
    if node.op == "call_function" and node.target is call_under_autocast:
        return node.args[3], tuple(node.args[4:]), dict(node.kwargs)
    return node.target, tuple(node.args), dict(node.kwargs)
