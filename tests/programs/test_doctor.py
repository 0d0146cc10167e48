"""The checks of an installation, each made to fail."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

from graphpipe.programs import doctor


def findings() -> dict[str, doctor.Finding]:
    return {item.check: item for item in doctor.examine()}


def test_missing_and_old_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.version

    def version(name: str) -> str:
        if name == "scipy":
            raise PackageNotFoundError(name)
        return "2.1.0" if name == "torch" else real(name)

    monkeypatch.setattr(doctor, "version", version)
    found = findings()
    assert (found["scipy"].state, found["scipy"].found) == ("error", "not installed")
    assert found["scipy"].fix.startswith("pip install 'scipy>=")
    assert found["torch"].state == "error"
    assert found["torch"].found == "2.1.0, but <3,>=2.13 is needed"
    assert found["numpy"].state == "ok"


@pytest.mark.parametrize(
    ("check", "break_it", "state"),
    [
        (
            "gloo back-end",
            lambda m: m.setattr(torch.distributed, "is_gloo_available", lambda: False),
            "error",
        ),
        (
            "worker processes",
            lambda m: m.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"]),
            "error",
        ),
        (
            "shared memory",
            lambda m: m.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20)),
            "warning",
        ),
        ("cores", lambda m: m.delenv("OMP_NUM_THREADS", raising=False), "warning"),
    ],
)
def test_fault_is_found(
    monkeypatch: pytest.MonkeyPatch,
    check: str,
    break_it: Callable[[pytest.MonkeyPatch], None],
    state: str,
) -> None:
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: {0, 1})
    break_it(monkeypatch)
    found = findings()[check]
    assert found.state == state
    assert found.fix


def test_check_that_fails_in_a_new_way_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: str) -> None:
        raise OSError("no such device")

    monkeypatch.setattr(shutil, "disk_usage", fails)
    found = findings()["shared memory"]
    assert found.state == "error"
    assert found.found == "OSError: no such device"
