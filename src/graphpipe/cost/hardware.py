"""What a torch device is: its name in the catalogue, a description, its memory."""

from __future__ import annotations

import os
import platform
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

CPU_KIND = "cpu-core"
"""Kind of device of a worker on a CPU."""
RESERVE = 2**30
"""Bytes of a GPU that a plan leaves alone: context, library workspaces, fragmentation."""

_KNOWN = (
    (r"V100.*32 ?GB", "v100-32gb"),
    (r"V100", "v100-16gb"),
    (r"A100.*80 ?GB", "a100-80gb"),
    (r"A100", "a100-40gb"),
    (r"H100.*PCIe", "h100-pcie"),
    (r"H100", "h100-sxm"),
    (r"H200", "h200"),
    (r"B200", "b200"),
    (r"MI300X", "mi300x"),
    (r"L40S", "l40s"),
    (r"\bL4\b", "l4"),
    (r"RTX 4090", "rtx-4090"),
)


class Hardware(NamedTuple):
    """A device of this machine.

    Attributes:
        kind: Name in the device catalogue where it is known, else made from its own name.
        description: Its full name; part of what a measurement belongs to.
        memory_bytes: What one worker on it can use.
    """

    kind: str
    description: str
    memory_bytes: int


def hardware(device: torch.device, *, workers: int = 1) -> Hardware:
    """What ``device`` is.

    Args:
        device: A CPU or CUDA device.
        workers: Workers that share the memory of a CPU's host.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        total = properties.total_memory
        return Hardware(kind_of(properties.name), properties.name, max(1, total - RESERVE))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Hardware(CPU_KIND, _cpu_name(), max(1, memory * 9 // 10 // workers))


def kind_of(name: str) -> str:
    """The catalogue's name of a GPU, from the name that its driver gives."""
    for pattern, kind in _KNOWN:
        if re.search(pattern, name):
            return kind
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "gpu"


@lru_cache(maxsize=1)
def _cpu_name() -> str:
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux: the platform's answer has to do
    return f"{name}, {torch.get_num_threads()} threads"
