"""Checks an installation: what works here, what does not, and what mends it."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

DISTRIBUTION = "graphpipe-torch"
SHARED_MEMORY_BYTES = 64 * 2**20
"""Less of /dev/shm than this, and DataLoader workers run out of it."""


@dataclass(frozen=True)
class Finding:
    """One check.

    Attributes:
        check: What was looked at.
        state: ``ok``, ``warning`` (something is slower or missing) or ``error`` (training
            will fail).
        found: What there is.
        fix: What to do; empty where all is well.
    """

    check: str
    state: Literal["ok", "warning", "error"]
    found: str
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        """The finding as plain data."""
        return asdict(self)


def examine() -> Iterator[Finding]:
    """Runs all checks, quick ones first; each yields at least one finding."""
    yield _python()
    yield from _dependencies()
    for check in (_torch_runs, _gloo, _start_methods, _accelerators, _cores, _shared_memory):
        yield _guarded(check)


def _guarded(check: Callable[[], Finding]) -> Finding:
    """A check that fails in a way nobody foresaw is a finding too."""
    try:
        return check()
    except Exception as error:
        name = check.__name__.strip("_").replace("_", " ")
        fix = "Install torch anew: pip install --force-reinstall torch"
        return Finding(name, "error", f"{type(error).__name__}: {error}", fix)


def _python() -> Finding:
    found = sys.version.split()[0]
    wanted = metadata(DISTRIBUTION)["Requires-Python"]
    if not SpecifierSet(wanted).contains(found, prereleases=True):
        return Finding("python", "error", found, f"Install Python {wanted}")
    return Finding("python", "ok", found)


def _dependencies() -> Iterator[Finding]:
    for line in requires(DISTRIBUTION) or ():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        fix = f"pip install '{requirement.name}{requirement.specifier}'"
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            yield Finding(requirement.name, "error", "not installed", fix)
            continue
        if requirement.specifier.contains(found, prereleases=True):
            yield Finding(requirement.name, "ok", found)
        else:
            want = f"{found}, but {requirement.specifier} is needed"
            yield Finding(requirement.name, "error", want, fix)


def _torch_runs() -> Finding:
    import torch

    weight = torch.ones(3, requires_grad=True)
    (weight * torch.arange(3.0)).sum().backward()
    if weight.grad is None or weight.grad.tolist() != [0.0, 1.0, 2.0]:
        return Finding("autograd", "error", f"gradient {weight.grad}", "Install torch anew")
    return Finding("autograd", "ok", f"torch {torch.__version__}")


def _gloo() -> Finding:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        fix = "Install a torch build with distributed support (the wheels on PyPI have it)"
        return Finding("gloo back-end", "error", "not in this build of torch", fix)
    if dist.is_initialized():
        return Finding("gloo back-end", "ok", f"in use: {dist.get_backend()}")
    with tempfile.TemporaryDirectory() as folder:
        # Gloo looks for a network device here, and fails where the host name has no address.
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        dist.destroy_process_group()
    return Finding("gloo back-end", "ok", "a process group was made")


def _start_methods() -> Finding:
    methods = multiprocessing.get_all_start_methods()
    if "fork" not in methods:
        return Finding(
            "worker processes",
            "error",
            f"start methods {', '.join(methods)}",
            "Workers are forked: use Linux",
        )
    return Finding("worker processes", "ok", "fork")


def _accelerators() -> Finding:
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return Finding("accelerators", "ok", "none: training runs on the CPU with gloo")
    count = torch.cuda.device_count()
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    if not dist.is_nccl_available():
        fix = "Install a torch build with NCCL to train on several GPUs"
        return Finding("accelerators", "warning", f"{count} x {names}, without NCCL", fix)
    return Finding("accelerators", "ok", f"{count} x {names}, NCCL")


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS")
    found = f"{usable} usable"
    if threads is None and usable > 1:
        fix = "Set OMP_NUM_THREADS=1 when you start several workers on one machine yourself"
        return Finding("cores", "warning", f"{found}, OMP_NUM_THREADS is not set", fix)
    return Finding("cores", "ok", found)


def _shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free
    found = f"{free // 2**20} MiB free in /dev/shm"
    if free < SHARED_MEMORY_BYTES:
        fix = "Enlarge /dev/shm (in Docker: --shm-size=1g), DataLoader workers need it"
        return Finding("shared memory", "warning", found, fix)
    return Finding("shared memory", "ok", found)
