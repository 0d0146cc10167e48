"""A rank that fails while checkpoints are saved or loaded: nothing hangs, nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from graphpipe.errors import CheckpointError, StageFailedError
from graphpipe.runtime.checkpoint import engine
from graphpipe.runtime.checkpoint.folder import complete_checkpoints
from graphpipe.runtime.checkpoint.plain import verify
from graphpipe.runtime.launch import launch
from graphpipe.runtime.pipeline import Pipeline
from tests.runtime.equality import adamw, example
from tests.runtime.manual import Part, manual_plan

PARTS = [Part("stem", 6), Part("a", 6), Part("b cat", 6)]
TIMEOUT = 5.0
VICTIM = 1


def _fail(kind: str) -> None:
    if kind == "raise":
        raise ArithmeticError("injected")
    if kind == "exit":
        os._exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while kind == "stall":
        time.sleep(0.1)


def _run(root: str, kind: str, where: str) -> None:
    made, graph = example("diamond")
    plan = manual_plan(graph, PARTS, batch_size=12)
    pipe = Pipeline(made.model, plan, made.loss_fn, adamw, graph=graph, timeout=TIMEOUT)
    pipe.step(made.args, targets=made.targets)
    pipe.save(root)
    pipe.step(made.args, targets=made.targets)
    if dist.get_rank() == VICTIM:
        name = "checksum"  # called for every block that is written or read

        def failing(tensor: torch.Tensor) -> Any:
            _fail(kind)

        setattr(engine, name, failing)
    if where == "load":
        pipe.load(root)
    else:
        handle = pipe.save(root, background=where == "background")
        if where == "background":
            handle.wait()


@pytest.mark.parametrize("where", ["save", "load", "background"])
@pytest.mark.parametrize(
    "kind", ["raise", "kill", *(pytest.param(k, marks=pytest.mark.long) for k in ("exit", "stall"))]
)
def test_a_rank_that_fails_meanwhile(tmp_path: Path, kind: str, where: str) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    start = time.monotonic()
    with pytest.raises((CheckpointError, StageFailedError)) as caught:
        launch(_run, 3, (str(tmp_path), kind, where), timeout=TIMEOUT, threads=1, method="fork")
    seconds = time.monotonic() - start
    text = str(caught.value)
    expected = {
        "raise": "ArithmeticError: injected",
        "exit": "exit code 3",
        "kill": "SIGKILL",
        # In the background nobody watches the disk: the others lose patience.
        "stall": "lost contact" if where == "background" else "did not end within",
    }
    assert expected[kind] in text
    if not (kind == "stall" and where == "background"):
        assert f"rank {VICTIM}" in text.lower()
    assert seconds < 3 * TIMEOUT + 20
    assert not {p.pid for p in psutil.Process().children(recursive=True)} - before
    [good] = complete_checkpoints(tmp_path)
    assert good.name == "step-00000001"
    verify(good)
