"""The hard cases as examples of ours: load, capture, cut at random, run, and references."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import networkx as nx
import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphpipe.cost.cluster import Cluster, Device
from graphpipe.graph.capture import capture
from graphpipe.graph.cut import partition_ops
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.assemble import StageChoice, assemble
from graphpipe.plan.plan import Plan
from graphpipe.runtime.pipeline import Pipeline
from tests.samples import cases_dir

BATCH = 12
CAPTURE_OPTIONS: dict[str, dict[str, Any]] = {
    "a09_none_and_flags": {"not_per_sample": ("kwargs['class_weight']",)},
    "a27_data_dependent": {"opaque": ("router",)},
}


@dataclass(frozen=True, eq=False)
class Case:
    """One model file: what ``build`` gives, its targets and its description."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[..., Any] | None
    targets: Any
    meta: dict[str, Any]
    module: ModuleType


@lru_cache(maxsize=64)
def load_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, cases_dir() / "models" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(name: str, build: str = "build") -> Case:
    """A fresh copy of the case: the same values at every call."""
    module = load_module(name)
    model, args, kwargs, loss_fn = getattr(module, build)()
    model.train()
    return Case(name, model, args, dict(kwargs), loss_fn, module.target(), module.META, module)


@lru_cache(maxsize=64)
def captured(name: str) -> ModelGraph:
    case = load(name)
    return capture(
        case.model,
        case.args,
        case.kwargs,
        targets=case.targets,
        loss_fn=case.loss_fn,
        name=name,
        **CAPTURE_OPTIONS.get(name, {}),
    )


def random_cut(graph: ModelGraph, stages: int, rng: random.Random) -> list[tuple[str, ...]] | None:
    """Splits the graph along a random topological order; None if that cut is not legal.

    A random order mixes branches, so the stages form a graph as often as a chain.
    """
    names = partition_ops(graph)
    unit = {
        name: name
        if graph.op_by_name[name].group is None
        else f"group {graph.op_by_name[name].group}"
        for name in names
    }
    dag = nx.DiGraph()
    dag.add_nodes_from(unit.values())
    for name in names:
        for source in graph.op_by_name[name].inputs:
            if source in unit and unit[source] != unit[name]:
                dag.add_edge(unit[source], unit[name])
    order = list(_random_order(dag, rng))
    if len(order) < stages:
        return None
    marks = sorted(rng.sample(range(1, len(order)), stages - 1))
    stage_of = {item: sum(mark <= place for mark in marks) for place, item in enumerate(order)}
    owner = {name: stage_of[unit[name]] for name in names}
    for name in names:
        for source in graph.op_by_name[name].inputs:
            if source not in owner or owner[source] == owner[name]:
                continue
            if not graph.op_by_name[source].crossable:
                return None
    return [tuple(name for name in names if owner[name] == i) for i in range(stages)]


def _random_order(dag: nx.DiGraph[str], rng: random.Random) -> Iterator[str]:
    missing = {node: dag.in_degree(node) for node in dag}
    ready = sorted(node for node, count in missing.items() if count == 0)
    # Sticking to one branch with a random strength gives long runs as well as shuffles.
    stick = rng.random()
    while ready:
        place = len(ready) - 1 if rng.random() < stick else rng.randrange(len(ready))
        node = ready.pop(place)
        yield node
        for target in dag.successors(node):
            missing[target] -= 1
            if missing[target] == 0:
                ready.append(target)
    assert not any(missing.values()), "atomic groups form a cycle"


def plan_of(
    graph: ModelGraph,
    cut: Sequence[Sequence[str]],
    micro_batches: Sequence[int],
    *,
    replicas: Sequence[int] | None = None,
    recompute: Sequence[bool] | None = None,
    share: bool = False,
    batch_size: int = BATCH,
    builder: str = "auto",
) -> Plan:
    """A plan of these stages: one device for each replica, or (``share``) two in all."""
    many = list(replicas or [1] * len(cut))
    starts = [sum(many[:i]) for i in range(len(cut))]
    devices = [
        (i % 2,) if share else tuple(range(start, start + count))
        for i, (start, count) in enumerate(zip(starts, many, strict=True))
    ]
    again = list(recompute or [False] * len(cut))
    choices = [
        StageChoice(
            ops=tuple(ops),
            micro_batch=micro_batches[i],
            replicas=many[i],
            devices=devices[i],
            recompute=again[i],
        )
        for i, ops in enumerate(cut)
    ]
    world = 1 + max(rank for place in devices for rank in place)
    cluster = Cluster(devices=tuple(Device(kind="cpu", memory_bytes=2**40) for _ in range(world)))
    return assemble(graph, None, cluster, choices, batch_size=batch_size, builder=builder)


@dataclass
class Result:
    """What one training step leaves: loss, gradients by name, buffers by name."""

    loss: float
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def run(case: Case, graph: ModelGraph, plan: Plan, **options: Any) -> Result:
    """One step of the plan in this process."""
    pipe = Pipeline(
        case.model,
        plan,
        case.loss_fn,
        lambda named: torch.optim.SGD(named, lr=0.0),
        graph=graph,
        transport="in_process",
        capture_options=CAPTURE_OPTIONS.get(case.name, {}),
        **options,
    )
    loss = pipe.step(case.args, case.kwargs, targets=case.targets)
    gradients = {
        name: value.grad.to_dense().clone()
        for name, value in pipe.named_parameters()
        if value.grad is not None
    }
    state = pipe.state_dict()
    pipe.close()
    buffers = {name: state[name] for name, _ in case.model.named_buffers() if name in state}
    return Result(float(loss), gradients, buffers)


def reference(name: str, micro_batch: int) -> Result:
    """A plain loop over micro-batches of this many samples, in one process."""
    case = load(name)
    sizes = case.meta.get("batch_dims", {})
    count = case.meta.get("count")
    total = 0.0
    for start in range(0, BATCH, micro_batch):
        stop = min(start + micro_batch, BATCH)
        targets = _part(case.targets, sizes.get("target", ...), start, stop)
        weight = (stop - start) / BATCH if count is None else count(targets) / count(case.targets)
        args = _part(case.args, sizes.get("args", ...), start, stop)
        kwargs = _part(case.kwargs, sizes.get("kwargs", ...), start, stop)
        output = case.model(*args, **kwargs)
        if weight == 0:
            continue
        loss = output if case.loss_fn is None else case.loss_fn(output, targets)
        (loss * weight).backward()
        total += float(loss.detach()) * weight
    gradients = {
        key: value.grad.clone()
        for key, value in case.model.named_parameters()
        if value.grad is not None
    }
    buffers = {key: value.clone() for key, value in case.model.named_buffers()}
    return Result(total, gradients, buffers)


def _part(tree: Any, dims: Any, start: int, stop: int) -> Any:
    if dims is ...:
        return pytree.tree_map(
            lambda t: (
                t[start:stop]
                if isinstance(t, torch.Tensor) and t.dim() and t.shape[0] == BATCH
                else t
            ),
            tree,
        )
    leaves, spec = pytree.tree_flatten(tree)
    flat = pytree.tree_flatten(dims, is_leaf=lambda item: item is None)[0]
    cut = [
        leaf
        if dim is None or not isinstance(leaf, torch.Tensor)
        else leaf.narrow(dim, start, stop - start)
        for leaf, dim in zip(leaves, flat, strict=True)
    ]
    return pytree.tree_unflatten(cut, spec)


def assert_equal(got: Result, want: Result, tolerance: float = 1e-5) -> None:
    """Loss, every gradient and every buffer; a gradient that is missing must be missing."""
    assert abs(got.loss - want.loss) <= tolerance * max(1.0, abs(want.loss))
    assert got.gradients.keys() == want.gradients.keys()
    largest = max(float(value.abs().max()) for value in want.gradients.values())
    for name, value in got.gradients.items():
        torch.testing.assert_close(
            value,
            want.gradients[name],
            rtol=tolerance,
            atol=tolerance * largest,
            msg=lambda text, name=name: f"gradient of {name}: {text}",
        )
    for name, value in got.buffers.items():
        torch.testing.assert_close(
            value,
            want.buffers[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"buffer {name}: {text}",
        )
