"""A small model of a user's, and ways to run a command line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from graphpipe.cli.app import app

MODEL = """
import torch
from torch import nn
from graphpipe import Batch, Job


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.right = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(32, 1)

    def forward(self, a, b):
        return self.head(torch.cat([self.left(a), self.right(b)], 1)).squeeze(1)


def batch(samples, seed):
    draw = torch.Generator().manual_seed(seed)
    a = torch.randn(samples, 6, generator=draw)
    b = torch.randn(samples, 4, generator=draw)
    return Batch((a, b), {}, a.sum(1) - b.sum(1))


def data(batch_size, epoch):
    return [batch(batch_size, 10 * epoch + i) for i in range(5)]


def job():
    example = batch(2, 0)
    return Job(Branches, example.args, targets=example.targets,
               loss_fn=nn.functional.mse_loss, data=data, batch_size=8, name="branches")


def without_data():
    example = batch(2, 0)
    return Job(Branches, example.args, targets=example.targets, loss_fn=nn.functional.mse_loss)
"""


@dataclass(frozen=True)
class Files:
    """What commands made of the model."""

    model: str
    graph: Path
    plan: Path


def run(*words: object) -> Any:
    """Runs a command line, which has to succeed."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result


def run_json(*words: object) -> Any:
    """Runs a command line with --json; standard output has to be one document."""
    return json.loads(run(*words, "--json").stdout)


def fail(*words: object, code: int = 1) -> str:
    """Runs a command line that has to fail; the paragraph that it says."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr
