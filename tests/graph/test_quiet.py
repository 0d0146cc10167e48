"""A model that fails while it is captured is told in our words alone."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import torch
from torch import nn
import graphpipe as gp

model = nn.Sequential(nn.Linear(4, 8), nn.Linear(7, 2))
try:
    gp.capture(model, (torch.zeros(4, 4),), targets=torch.zeros(4, 2),
               loss_fn=nn.functional.mse_loss)
except gp.GraphPipeError as error:
    print("told:", error)
"""


def test_torch_prints_nothing_before_the_message_for_wrong_shapes() -> None:
    # A process of its own: torch sets up its loggers once, on its own standard error.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SCRIPT],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.startswith("told:")
    assert "same reduction dim" in done.stdout
