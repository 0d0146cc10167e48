"""No stage keeps more activations than its plan allows, and nothing grows."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import psutil
import pytest
import torch

from graphpipe.runtime.pipeline import Pipeline
from graphpipe.runtime.stage_runner import StageRunner
from tests.runtime.equality import example, sgd
from tests.runtime.manual import Part, manual_plan

PLANS = {
    "chain": ("chain", [Part("a", 1), Part("b", 1), Part("c", 1), Part("d", 1)]),
    "diamond": ("diamond", [Part("stem", 1), Part("a", 2), Part("b", 1), Part("cat", 2)]),
    "skip": ("skip", [Part("a", 1), Part("b", 1), Part("c", 1), Part("add d", 1)]),
    "replicas": ("chain", [Part("a", 2), Part("b", 1, replicas=2), Part("c d", 2)]),
    "shared device": (
        "diamond",
        [Part("stem", 1, (0,)), Part("a", 1, (1,)), Part("b", 1, (0,)), Part("cat", 1, (1,))],
    ),
    "recomputed": (
        "chain",
        [Part("a", 1, recompute=True), Part("b", 1, recompute=True), Part("c d", 1)],
    ),
}


class _Token:
    """Stands for a saved tensor; says when autograd lets it go."""

    def __init__(self, live: Counter[tuple[int, int]], key: tuple[int, int]) -> None:
        self.live = live
        self.key = key
        live[key] += 1

    def __del__(self) -> None:
        self.live[self.key] -= 1


class _Meter:
    """Counts the samples whose activations each stage runner keeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most: Counter[int] = Counter()
        live: Counter[tuple[int, int]] = Counter()
        plain = StageRunner._run
        meter = self

        def run(
            runner: StageRunner, size: int, arguments: list[Any], seed: tuple[int, int, int]
        ) -> Any:
            key = (id(runner), seed[2])

            def pack(tensor: torch.Tensor) -> tuple[_Token, torch.Tensor]:
                return _Token(live, key), tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1]):
                values = plain(runner, size, arguments, seed)
            kept = sum(1 for (owner, _), count in live.items() if owner == key[0] and count)
            meter.most[key[0]] = max(meter.most[key[0]], kept * size)
            return values

        monkeypatch.setattr(StageRunner, "_run", run)


@pytest.mark.parametrize("case", PLANS)
def test_live_activations_never_exceed_the_in_flight_bound(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, parts = PLANS[case]
    made, graph = example(name)
    plan = manual_plan(graph, parts, batch_size=12)
    meter = _Meter(monkeypatch)
    pipe = Pipeline(made.model, plan, made.loss_fn, sgd, graph=graph, transport="in_process")
    for _ in range(2):
        pipe.step(made.args, targets=made.targets)
    variant = pipe.first_variant
    for number, stage in enumerate(plan.stages):
        runners = [
            worker.runners(variant)[number]
            for worker in pipe.workers
            if number in worker.runners(variant)
        ]
        samples = sum(meter.most[id(runner)] for runner in runners)
        if stage.recompute:
            assert samples == stage.micro_batch  # one micro-batch, while it is recomputed
        else:
            assert 0 < samples <= stage.in_flight


def test_nothing_grows_over_200_steps() -> None:
    made, graph = example("diamond")
    parts = [Part("stem", 2), Part("a", 4), Part("b", 1, recompute=True), Part("cat", 4)]
    plan = manual_plan(graph, parts, batch_size=12)
    pipe = Pipeline(made.model, plan, made.loss_fn, sgd, graph=graph, transport="in_process")
    process = psutil.Process()

    def measure() -> tuple[int, int, int]:
        gc.collect()
        tensors = sum(1 for item in gc.get_objects() if type(item) is torch.Tensor)
        return tensors, process.num_fds(), process.num_threads()

    for _ in range(5):
        pipe.step(made.args, targets=made.targets)
    before = measure()
    for _ in range(200):
        pipe.step(made.args, targets=made.targets)
    assert measure() == before
