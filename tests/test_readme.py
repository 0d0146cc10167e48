"""The README's code runs: as one script under torchrun, and its commands exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import typer

from graphpipe.cli.app import app
from tests.samples import REPOSITORY

TEXT = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_code_runs_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)))
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*start, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Plan for TwoTowers" in done.stdout
    # Two ranks share one pipe: a line of one may stand inside a line of the other.
    losses = re.findall(r"loss (\d+\.\d{3})", done.stdout)
    assert len(losses) == 2
    assert losses[0] == losses[1]


def test_commands_and_options_exist() -> None:
    root = typer.main.get_command(app)
    lines = re.findall(r"^(?:\| `)?(graphpipe [a-z].*?)(?:` \|.*)?$", TEXT, re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        _, name, *words = shlex.split(line)
        command = root.commands[name]  # type: ignore[attr-defined]
        known = {option for p in command.params for option in p.opts}
        for word in words:
            assert not word.startswith("-") or word in known, line


def test_links_resolve() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT):
        assert (REPOSITORY / target).exists(), target
