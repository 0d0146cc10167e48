"""Names of devices."""

from __future__ import annotations

import pytest
import torch

from graphpipe.cost.catalogue import catalogue
from graphpipe.cost.hardware import CPU_KIND, hardware, kind_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ],
)
def test_drivers_names_are_those_of_the_catalogue(name: str, kind: str) -> None:
    assert kind_of(name) == kind
    assert kind in catalogue()


def test_an_unknown_gpu_keeps_its_own_name() -> None:
    assert kind_of("NVIDIA RTX PRO 6000 (Server)") == "nvidia-rtx-pro-6000-server"
    assert kind_of("...") == "gpu"


def test_cpu() -> None:
    one, four = hardware(torch.device("cpu")), hardware(torch.device("cpu"), workers=4)
    assert one.kind == CPU_KIND in catalogue()
    assert "threads" in one.description
    assert one.memory_bytes > 3 * four.memory_bytes > 0
