"""Profiles kept in a file, measured again only where they are stale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from graphpipe.cost.hardware import hardware
from graphpipe.cost.profiler.profile import profile
from graphpipe.cost.table import CostTable
from graphpipe.errors import CostError, FileFormatError
from graphpipe.graph.model_graph import ModelGraph


def load_or_profile(
    graph: ModelGraph,
    path: str | Path,
    device: torch.device | str = "cpu",
    *,
    notice: Callable[[str], None] | None = None,
    **options: Any,
) -> CostTable:
    """The profile in a file if it fits, else a new one, which is written there.

    It fits if it was measured for this graph (shapes, parameters, mode), this version of
    torch, this hardware, these sizes, this optimizer and this precision.

    Args:
        graph: A graph captured in this process.
        path: The file; it need not exist.
        device: Where to measure.
        notice: Called with one sentence where something is measured again, and why.
        options: As for :func:`graphpipe.cost.profiler.profile.profile`.

    Raises:
        CostError: if the graph cannot be profiled.
        FileFormatError: if the file cannot be written.
    """
    if Path(path).exists():
        try:
            costs = CostTable.load(path)
            _check_here(costs, graph, torch.device(device), options)
            return costs
        except (CostError, FileFormatError) as error:
            if notice is not None:
                notice(f"{path} is measured again: {error.what}")
    costs = profile(graph, device, **options)
    costs.save(path)
    return costs


def _check_here(
    costs: CostTable, graph: ModelGraph, device: torch.device, options: dict[str, Any]
) -> None:
    costs.check(graph)
    if costs.source != "profiled":
        raise CostError("its costs were not measured")
    if costs.torch_version != torch.__version__:
        raise CostError("it was measured with another version of torch")
    found = hardware(device)
    if costs.hosts.get(options.get("kind") or found.kind) != found.description:
        raise CostError("it was measured on other hardware")
    wanted = options.get("micro_batches")
    if wanted is not None and tuple(wanted) != costs.micro_batches:
        raise CostError("it was measured at other micro-batch sizes")
    if costs.precision != options.get("precision", "fp32"):
        raise CostError("it was measured in another precision")
    memory = options.get("parameter_memory") or costs.parameter_memory
    if costs.optimizer != options.get("optimizer", "adamw") or memory != costs.parameter_memory:
        raise CostError("it was measured for another optimizer")
