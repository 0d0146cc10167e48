"""The files that commands make of a small model, for all tests here."""

from __future__ import annotations

import pytest

from tests.cli.helpers import MODEL, Files, run


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The model's file, its captured graph and a plan for two devices."""
    folder = tmp_path_factory.mktemp("cli")
    path = folder / "branches.py"
    path.write_text(MODEL)
    graph, plan = folder / "graph.json", folder / "plan.json"
    run("capture", f"{path}:job", "-o", graph, "-q")
    run("plan", graph, "--device", "cpu-core", "-n", 2, "-b", 8, "-o", plan, "-q")
    return Files(f"{path}:job", graph, plan)
