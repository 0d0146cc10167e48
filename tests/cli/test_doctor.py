"""``graphpipe doctor``."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from graphpipe.cli.app import app


def test_this_installation_is_sound() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    findings = json.loads(result.stdout)
    assert result.exit_code == 0, findings
    checks = {item["check"] for item in findings}
    assert {"python", "torch", "gloo back-end", "worker processes"} <= checks
    assert all(item["fix"] for item in findings if item["state"] != "ok")


def test_table_for_people() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert "what to do" in result.stdout
    assert "Everything that training needs is there." in result.stdout
