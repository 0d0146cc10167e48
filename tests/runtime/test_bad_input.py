"""Whatever is wrong is refused by our own exception, in one text on all ranks, before any message.

One launch of two ranks goes through every kind; after each refusal the pipeline still trains.
"""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphpipe.cost.analytic import estimate
from graphpipe.cost.cluster import Cluster
from graphpipe.cost.table import CostTable
from graphpipe.errors import GraphPipeError
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.runtime.launch import launch
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.runtime.process_group import ProcessGroupTransport
from tests.runtime.equality import example, sgd, single_process
from tests.runtime.manual import Part, manual_plan
from tests.runtime.models import build

PARTS = [Part("p", 2, (0,)), Part("q", 2, (1,)), Part("r1 r2 r3", 2, (0,)), Part("cat join", 2, (1,))]  # fmt: skip  # noqa: E501
NAME = "unequal"


def _step(pipe: Pipeline, **change: Any) -> Any:
    made = build(NAME)
    kwargs = {**made.kwargs, **change.get("kwargs", {})}
    for name in change.get("without", ()):
        del kwargs[name]
    return pipe.step(change.get("args", made.args), kwargs, targets=change.get("targets", made.targets))  # fmt: skip  # noqa: E501


def _plan_file(plan: Plan, change: Callable[[Any], object]) -> Plan:
    data = json.loads(plan.to_json())
    change(data)
    return Plan.from_json(json.dumps(data), where="plan.json")


def _made(plan: Plan, **options: Any) -> Pipeline:
    made, graph = example(NAME)
    options.setdefault("graph", graph)
    model = options.pop("model", made.model)
    return Pipeline(model, plan, made.loss_fn, sgd, timeout=30, **options)


def _on_meta() -> torch.nn.Module:
    with torch.device("meta"):
        return build(NAME).model


def _first_rank(good: Any, bad: Any) -> Any:
    return bad if dist.get_rank() == 0 else good


def kinds(pipe: Pipeline, plan: Plan, graph: ModelGraph, folder: Path) -> dict[str, Any]:
    """By kind, what provokes it and what the text must say."""
    made = build(NAME)
    y = made.kwargs["y"]
    checkpoint = next(folder.glob("step-*"))
    return {
        "wrong shape": (lambda: _step(pipe, kwargs={"y": torch.zeros(12, 4)}), r"kwargs\['y'\]"),
        "wrong shape on one rank": (
            lambda: _step(pipe, kwargs={"y": _first_rank(y, torch.zeros(12, 4))}), r"kwargs\['y'\]"
        ),
        "wrong dtype": (lambda: _step(pipe, kwargs={"y": y.double()}), "float64"),
        "missing keyword": (lambda: _step(pipe, without=["z"]), "z"),
        "missing keyword on one rank": (
            lambda: _step(pipe, without=_first_rank([], ["z"])), "z"
        ),
        "missing labels": (lambda: _step(pipe, targets=None), "targets"),
        "no tensor": (lambda: _step(pipe, args=("text",)), r"args\[0\]|args"),
        "another model": (
            lambda: _made(plan, model=build("diamond").model, graph=None), "plan|graph|model"
        ),
        "another graph": (lambda: _made(plan, graph=example("diamond")[1]), "graph|model"),
        "world size": (
            lambda: _made(manual_plan(graph, [Part("p", 2), Part("q", 2), Part("r1 r2 r3", 2), Part("cat join", 2)], batch_size=12)),  # noqa: E501
            "number of processes.*Expected 4 processes.*got 2",
        ),
        "meta parameters": (lambda: _made(plan, model=_on_meta(), graph=None), "meta device"),
        "micro-batch does not divide": (
            lambda: _made(
                manual_plan(graph, [Part("p", 3), Part("q r1 r2 r3 cat", 2)], batch_size=12)
            ),
            "micro-batch",
        ),
        "unknown stage": (
            lambda: _made(_plan_file(plan, lambda d: d["schedule"]["lines"].__setitem__(
                0, d["schedule"]["lines"][0].replace("F0.", "F9.")))),
            "stage 9|F9|unknown",
        ),
        "truncated plan": (
            lambda: Plan.from_json(plan.to_json()[:-500], where="plan.json"), "plan.json"
        ),
        "tampered plan": (
            lambda: _made(_plan_file(plan, lambda d: d["stages"][0].update(micro_batch=5))),
            "micro-batch|micro_batch",
        ),
        "truncated costs": (lambda: CostTable.load(folder / "half.json"), "half.json"),
        "checkpoint of nothing": (lambda: pipe.load(folder / "none"), "no complete checkpoint"),
        "tampered checkpoint": (lambda: pipe.load(checkpoint), "damaged"),
        "missing back-end": (lambda: _made(plan, device="cuda"), "NCCL|CUDA|cuda"),
    }  # fmt: skip


def _all(root: str) -> dict[str, tuple[str, str, float, int]]:
    folder = Path(root)
    _, graph = example(NAME)
    plan = manual_plan(graph, PARTS, batch_size=12)
    pipe = _made(plan)
    pipe.save(folder)
    if dist.get_rank() == 0:
        costs = folder / "half.json"
        estimate(graph, Cluster.uniform("l4"), micro_batches=[1, 2]).save(costs)
        costs.write_text(costs.read_text()[:-100])
        file = next(folder.glob("step-*/model-00001.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    dist.barrier()
    sent = 0
    plain = ProcessGroupTransport.send

    def counted(*args: Any, **rest: Any) -> Any:
        nonlocal sent
        sent += 1
        return plain(*args, **rest)

    ProcessGroupTransport.send = counted  # type: ignore[method-assign]
    found: dict[str, tuple[str, str, float, int]] = {}
    for kind, (provoke, _) in kinds(pipe, plan, graph, folder).items():
        before, start = sent, time.monotonic()
        try:
            provoke()
            text, name = "no error", ""
        except GraphPipeError as error:
            text, name = str(error), type(error).__name__
        except Exception as error:
            text, name = f"{type(error).__name__}: {error}", "foreign"
        found[kind] = (name, text, time.monotonic() - start, sent - before)
        dist.barrier()
    loss = float(_step(pipe))
    found["afterwards"] = ("", f"{loss:.9f}", 0.0, 0)
    return found


def test_every_kind_of_bad_input(tmp_path: Path) -> None:
    results = launch(_all, 2, (str(tmp_path),), timeout=60, threads=1)
    made, graph = example(NAME)
    wants = kinds(None, manual_plan(graph, PARTS, batch_size=12), graph, tmp_path)  # type: ignore[arg-type]
    wrong: list[str] = []
    for kind, (_, pattern) in wants.items():
        (name, text, seconds, sent), other = (result[kind] for result in results)
        if name in ("", "foreign") or not re.search(f"(?si){pattern}", text):
            wrong.append(f"{kind}: {name} {text}")
        elif (name, text) != other[:2]:
            wrong.append(f"{kind}: {text!r} on rank 0 and {other[1]!r} on rank 1")
        elif max(seconds, other[2]) > 10 or sent or other[3]:
            wrong.append(f"{kind}: {seconds} s and {sent} messages, {other[2:]}")
    assert not wrong, "\n".join(wrong)
    want = single_process(copy.copy(made), sgd, 1)[0][0][0]
    for result in results:
        assert float(result["afterwards"][1]) == pytest.approx(want, abs=1e-6)
