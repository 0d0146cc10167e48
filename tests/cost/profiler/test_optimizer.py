"""Time of an optimizer step."""

from __future__ import annotations

import pytest
import torch

from graphpipe.cost.profiler.optimizer import optimizer_seconds_per_byte
from graphpipe.cost.profiler.timing import Clock

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["sgd", "sgd-momentum", "adagrad", "adam", "adamw", "another"])
def test_every_optimizer_takes_time(name: str) -> None:
    seconds = optimizer_seconds_per_byte(name, CPU, Clock(CPU))
    assert 1e-12 < seconds < 1e-5
