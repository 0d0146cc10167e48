"""The documentation builds without a warning: no broken link, no unknown name."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS


@pytest.mark.timeout(600)
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    for module in ("sphinx", "furo", "myst_parser", "latex2mathml"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed (pip install graphpipe-torch[docs])")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q"]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "trees"), str(DOCS), str(tmp_path / "html")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "html" / "api" / "planner.html").read_text(encoding="utf-8")
    assert "batch_size" in page, "signatures come from the code"
    messages = (tmp_path / "html" / "troubleshooting.html").read_text(encoding="utf-8")
    assert "The timeline is not of this plan" in re.sub("<[^>]+>", "", messages)
