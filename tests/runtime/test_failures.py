"""Whatever happens to a rank, nothing hangs and the first failure is the one that is shown."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from graphpipe.errors import GraphPipeError, RuntimeSetupError, StageFailedError
from graphpipe.runtime.executor import Executor
from graphpipe.runtime.launch import launch
from graphpipe.runtime.pipeline import Pipeline
from tests.runtime.equality import example, sgd
from tests.runtime.manual import Part, manual_plan

PARTS = [Part("stem", 2), Part("a", 2), Part("b", 2, (2,)), Part("cat", 2, (0,))]
KINDS = ("raise", "exit", "kill", "stall", "data")
TIMEOUT = 4.0


class _Injection:
    """Makes rank ``rank`` fail in its task number ``task`` of step ``step``."""

    def __init__(self, kind: str, rank: int, task: int, step: int) -> None:
        self.kind = kind
        self.rank = rank
        self.task = task
        self.step = step

    def install(self) -> None:
        plain = Executor._guarded
        count = 0

        def guarded(executor: Executor, run: Any, task: Any, *rest: Any) -> Any:
            def failing(task: Any, *inner: Any) -> Any:
                nonlocal count
                count += 1
                if count == self.step * executor._program.tasks + self.task + 1:
                    self._fail()
                return run(task, *inner)

            return plain(executor, failing, task, *rest)

        Executor._guarded = guarded  # type: ignore[method-assign]

    def _fail(self) -> None:
        if self.kind == "raise":
            raise ArithmeticError("injected")
        if self.kind == "data":
            torch.nn.functional.embedding(torch.tensor([99]), torch.zeros(3, 2))
        if self.kind == "exit":
            os._exit(3)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while self.kind == "stall":
            time.sleep(0.1)


def _inject(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    made, graph = example("diamond")
    plan = manual_plan(graph, PARTS, batch_size=12)
    rank = rng.randrange(plan.world_size)
    tasks = len(plan.schedule.tasks[rank])
    injection = _Injection(kind, rank, rng.randrange(tasks), rng.randrange(2))

    def run() -> None:
        if dist.get_rank() == rank:
            injection.install()
        pipe = Pipeline(made.model, plan, made.loss_fn, sgd, graph=graph, timeout=TIMEOUT)
        for _ in range(3):
            pipe.step(made.args, targets=made.targets)

    before = {process.pid for process in psutil.Process().children(recursive=True)}
    start = time.monotonic()
    with pytest.raises(StageFailedError) as caught:
        launch(run, plan.world_size, timeout=TIMEOUT, threads=1, method="fork")
    seconds = time.monotonic() - start
    text = str(caught.value)
    assert f"rank {rank}" in text
    task = str(plan.schedule.tasks[rank][injection.task])
    stage, number = task[1:].split(".")
    if kind in ("raise", "data", "stall"):
        assert f"stage {stage} (" in text
        assert f"task {task}" in text
    if kind in ("raise", "data"):
        assert f"micro-batch {number} failed" in text
    expected = {
        "raise": "ArithmeticError: injected",
        "data": "IndexError",
        "exit": "exit code 3",
        "kill": "SIGKILL",
        "stall": "did not end within",
    }
    assert expected[kind] in text
    assert seconds < (3 * TIMEOUT + 10 if kind == "stall" else TIMEOUT + 10)
    left = {process.pid for process in psutil.Process().children(recursive=True)} - before
    assert not left


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_ends_the_run_and_is_named(kind: str) -> None:
    _inject(kind, KINDS.index(kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.long if seed < 104 else pytest.mark.campaign)
        for seed in range(100, 120)
    ],
)
def test_failures_at_random_places(kind: str, seed: int) -> None:
    _inject(kind, seed)


class _BadStep(torch.optim.SGD):
    """An optimizer whose second step raises."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 2:
            raise ZeroDivisionError("no step today")
        return super().step(closure)


def test_an_optimizer_step_that_raises_is_told_to_every_rank() -> None:
    made, graph = example("diamond")
    plan = manual_plan(graph, PARTS, batch_size=12)

    def optimizer(named: Any) -> torch.optim.Optimizer:
        kind = _BadStep if dist.get_rank() == 1 else torch.optim.SGD
        return kind(named, lr=0.1)

    def run() -> list[str]:
        pipe = Pipeline(made.model, plan, made.loss_fn, optimizer, graph=graph, timeout=TIMEOUT)
        texts: list[str] = []
        for _ in range(4):
            try:
                pipe.step(made.args, targets=made.targets)
            except GraphPipeError as error:
                texts.append(str(error))
                if dist.get_rank() == 1 and len(texts) == 1:
                    time.sleep(0.5)
                    pipe.close()  # as the end of a process does
        return texts

    results = launch(run, plan.world_size, timeout=TIMEOUT, threads=1, method="fork")
    for texts in results:
        # The first failure by name, then that nothing goes on after it.
        assert "ZeroDivisionError: no step today" in texts[0]
        assert "rank 1" in texts[0]
        assert "cannot go on" in texts[-1]
        assert "no step today" in texts[-1]


def test_after_a_failed_step_the_pipeline_refuses_to_go_on() -> None:
    made, graph = example("diamond")
    plan = manual_plan(graph, PARTS, batch_size=12)
    pipe = Pipeline(made.model, plan, made.loss_fn, sgd, graph=graph, transport="in_process")
    hook = pipe.named_parameters()[0][1].register_hook(lambda gradient: gradient[:, :0])
    with pytest.raises(StageFailedError, match="backward of micro-batch"):
        pipe.step(made.args, targets=made.targets)
    hook.remove()
    for call in (pipe.step, pipe.eval_step):
        with pytest.raises(RuntimeSetupError, match=r"backward of micro-batch .* checkpoint"):
            call(made.args, targets=made.targets)
    with pytest.raises(RuntimeSetupError, match="cannot go on"):
        pipe.state_dict()
    pipe.close()


def test_ranks_that_lose_contact_repeat_the_first_failure() -> None:
    made, graph = example("diamond")
    plan = manual_plan(graph, PARTS, batch_size=12)

    def run() -> str:
        if dist.get_rank() == 1:
            _Injection("raise", 1, 0, 0).install()
        pipe = Pipeline(made.model, plan, made.loss_fn, sgd, graph=graph, timeout=TIMEOUT)
        try:
            pipe.step(made.args, targets=made.targets)
        except StageFailedError as error:
            if dist.get_rank() == 1:
                time.sleep(0.5)
                dist.destroy_process_group()  # as the end of a process does
            return str(error)
        return "no error"

    texts = launch(run, plan.world_size, timeout=TIMEOUT, threads=1, method="fork")
    for text in texts:
        assert "ArithmeticError: injected" in text
        assert "rank 1, stage 1 (a), task F1.0" in text
    assert "earlier failure" in texts[0]
