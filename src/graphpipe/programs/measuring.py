"""Measures what is here: a model's operators, and the links between ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from graphpipe.cost.probe import Probe, probe
from graphpipe.cost.profiler.cache import load_or_profile
from graphpipe.cost.table import CostTable
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.report.files import write_text
from graphpipe.runtime.process_group import ensure_process_group

PROBE_SECONDS = 300.0
"""A transfer of the probe that makes no progress for so long is a failure."""


def measure(
    graph: ModelGraph,
    path: Path,
    device: str,
    *,
    micro_batches: Sequence[int],
    optimizer: str,
    precision: str,
    progress: Callable[[int, int, str], None],
    notice: Callable[[str], None],
) -> CostTable:
    """The measured costs in a file; measured again where the file does not fit.

    Raises:
        CostError: If the graph cannot be measured here.
    """
    return load_or_profile(
        graph,
        path,
        device,
        notice=notice,
        micro_batches=tuple(micro_batches),
        optimizer=optimizer,
        precision=precision,
        progress=progress,
    )


def probe_here(device: str, name: str, out: Path) -> Probe | None:
    """Measures the links between torchrun's ranks; rank 0 writes the file and gets the result.

    Raises:
        RuntimeSetupError: If this process was not started by torchrun.
    """
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    ensure_process_group(place, PROBE_SECONDS)
    try:
        found = probe(place, name=name)
        first = torch.distributed.get_rank() == 0
    finally:
        torch.distributed.destroy_process_group()
    if not first:
        return None
    write_text(out, found.toml(), what="the cluster")
    return found
