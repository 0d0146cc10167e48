"""Every example runs under torchrun with small sizes, learns, and resumes from its checkpoints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Small:
    """How to run an example in little time.

    Attributes:
        options: For its script.
        needs: Packages besides GraphPipe's own.
        result: What it prints at the end.
    """

    options: str
    needs: tuple[str, ...] = ()
    result: str = ""


SMALL = {
    "two_towers": Small(
        "--samples 256 --batch-size 64", result=r"held-out digits named rightly: [\d.]+ %"
    ),
    "vision_language": Small(
        "--samples 256 --width 16 --layers 1",
        ("transformers",),
        r"held-out digits named rightly: [\d.]+ %",
    ),
    "recommendation": Small("--samples 2100", ("statsmodels",), r"held-out AUC 0\.\d+"),
    "drug_response": Small("--samples 512 --width 16", result=r"explained of the held-out growth"),
    "translation": Small(
        "--languages nl --samples 256 --width 16 --layers 1", ("django",), r"' in 'nl': '"
    ),
}


def test_every_example_is_tested_and_has_a_readme() -> None:
    folders = {path.parent.name for path in EXAMPLES.glob("*/train.py")}
    assert folders == set(SMALL)
    for name in folders:
        text = (EXAMPLES / name / "README.md").read_text()
        assert f"torchrun --nproc-per-node=4 examples/{name}/train.py" in text
        options = set(re.findall(r"--[a-z][a-z-]+", text)) - {"--nproc-per-node", "--help"}
        script = (EXAMPLES / name / "train.py").read_text()
        assert all(f'"{option}"' in script for option in options)


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.timeout(1100)
def test_example_learns_saves_and_resumes(name: str, tmp_path: Path) -> None:
    for package in SMALL[name].needs:
        pytest.importorskip(package)
    first = run(name, tmp_path, epochs=1)
    assert [epoch for epoch, _ in losses(first)] == [1]
    # The second run goes on where the first one ended.
    second = run(name, tmp_path, epochs=2)
    assert [epoch for epoch, _ in losses(second)] == [2]
    assert losses(second)[0][1] < losses(first)[0][1]
    assert re.search(SMALL[name].result, second)


def run(name: str, checkpoints: Path, epochs: int) -> str:
    """Trains with two workers up to this epoch; returns what they print."""
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            str(EXAMPLES / name / "train.py"), "--epochs", str(epochs),
            "--checkpoints", str(checkpoints), *SMALL[name].options.split(),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(text: str) -> list[tuple[int, float]]:
    """(epoch, loss) of every epoch that a run printed."""
    return [(int(n), float(x)) for n, x in re.findall(r"epoch (\d+): loss ([\d.]+)", text)]
