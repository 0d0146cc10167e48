"""Where the sample files lie: hard cases and published profiles.

They are not part of this repository. They are looked for in the folder that
``$GRAPHPIPE_SHARED`` names, else in ``shared`` beside the checkout. A test that needs
them is skipped where they are absent.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def shared_dir() -> Path:
    """The folder of the sample files.

    Raises:
        pytest.skip.Exception: If there is none, with the places that were looked at.
    """
    named = os.environ.get("GRAPHPIPE_SHARED")
    folder = Path(named) if named else REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip(
            f"no sample files: {folder} does not exist (set GRAPHPIPE_SHARED to their folder)",
            allow_module_level=True,
        )
    return folder


def cases_dir() -> Path:
    """The hard cases: ``cases.md``, ``models/`` and ``graphs/``; skips where absent."""
    return _existing(shared_dir() / "cases")


def profiles_dir() -> Path:
    """Published profiles of PipeDream, Piper and others; skips where absent."""
    return _existing(shared_dir() / "profiles")


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        pytest.skip(f"no sample files: {folder} does not exist", allow_module_level=True)
    return folder
