"""The command ``graphpipe``."""

from __future__ import annotations

from graphpipe.cli.app import main

__all__ = ["main"]
