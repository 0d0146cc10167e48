"""Workers run unchanged under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.equality import example, sgd, single_process

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_torchrun_starts_the_ranks_of_a_plan() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.runtime.torchrun_script"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    history, _ = single_process(example("diamond")[0], sgd, 3)
    losses = re.findall(r"rank (\d) step (\d) loss ([\d.]+)", done.stdout)
    assert len(losses) == 6
    for _, step, loss in losses:
        assert float(loss) == pytest.approx(history[int(step)][0], abs=2e-6)
