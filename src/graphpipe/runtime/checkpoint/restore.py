"""Puts a checkpoint into workers: first everything is read and checked, then it is taken over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from graphpipe.errors import CheckpointError
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.runtime.checkpoint.engine import check_sizes
from graphpipe.runtime.checkpoint.facts import GroupMatch, schedulers_of
from graphpipe.runtime.checkpoint.index import Index, TensorEntry
from graphpipe.runtime.checkpoint.pieces import Piece, place_of
from graphpipe.runtime.checkpoint.values import decode
from graphpipe.runtime.worker import Worker

_SHOWN = 3


@dataclass(eq=False)
class _WorkerRestore:
    """What one worker will take over."""

    worker: Worker
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    match: GroupMatch | None = None
    options: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    schedulers: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    scale: dict[str, Any] | None = None


class Restore:
    """What loading a checkpoint into this process's workers takes.

    Args:
        folder: The checkpoint.
        index: Its index.
        graph: The graph that was planned.
        workers: This process's workers.
        schedulers: Schedulers that go on.
        model_only: Whether training starts anew with these values.

    Raises:
        CheckpointError: if it is of another model, optimizer or set of schedulers. Nothing
            has been changed then.
    """

    def __init__(
        self,
        folder: Path,
        index: Index,
        graph: ModelGraph,
        workers: Sequence[Worker],
        schedulers: Sequence[Any],
        model_only: bool,
    ) -> None:
        self.folder = folder
        self.index = index
        check_model(index, graph, str(folder))
        check_sizes(folder, index.tensors)
        self._graph = graph
        self._others = _other_buffers(index, graph)
        if self._others and not model_only:
            raise CheckpointError(
                "Buffers that are not part of the model's state differ from the checkpoint's",
                where=str(folder),
                expected="buffers of the same shapes and dtypes",
                got=_some(list(self._others.values())),
                fix="Build the model as it was saved, or load with model_only=True, which then "
                "leaves these buffers as they are",
            )
        self.pieces: list[Piece] = []
        """Blocks on the CPU, to be filled before :meth:`commit`."""
        self._parts = [
            self._plan_worker(worker, schedulers_of(worker, schedulers, workers), model_only)
            for worker in workers
        ]

    def _plan_worker(
        self, worker: Worker, schedulers: Sequence[Any], model_only: bool
    ) -> _WorkerRestore:
        part = _WorkerRestore(worker)
        saved = self.index.section("model") | self.index.section("buffer")
        for key in worker.state:
            place = place_of(self._graph.parameter_by_name[key])
            entry = saved.get(place.name)
            if entry is not None and place.name not in self._others:
                shape = tuple(worker.state[key].shape)
                part.state[key] = self._block(entry, shape, place.offsets)
        if not model_only:
            self._plan_training(part, schedulers)
        return part

    def _plan_training(self, part: _WorkerRestore, schedulers: Sequence[Any]) -> None:
        training, worker = self.index.training, part.worker
        if len(schedulers) != len(training.schedulers):
            raise CheckpointError(
                "The checkpoint has another number of learning rate schedulers",
                expected=f"{len(training.schedulers)}, as they were saved",
                got=len(schedulers),
                fix="Give the same schedulers in the same order: load(..., schedulers=[...])",
            )
        types = tuple(type(scheduler).__name__ for scheduler in schedulers)
        if types != training.scheduler_types:
            raise CheckpointError(
                "The checkpoint has learning rate schedulers of other kinds",
                expected=", ".join(training.scheduler_types),
                got=", ".join(types),
                fix="Give the same schedulers in the same order, or load with model_only=True",
            )
        if (worker.scale is None) != (training.scale is None):
            raise CheckpointError(
                "Loss scaling is on in one of checkpoint and pipeline, and off in the other",
                fix="Make the pipeline with the same loss_scale, or load with model_only=True",
            )
        if training.scale is not None:
            part.scale = decode(training.scale, "loss scale")
        if worker.optimizer is None:
            return
        if training.optimizer is None:
            raise CheckpointError(
                "The checkpoint has no optimizer state", fix="Load with model_only=True"
            )
        part.match = match = GroupMatch(worker, self._graph, training.optimizer)
        part.options = match.options()
        part.schedulers = [
            (scheduler, match.scheduler_state(number, training.schedulers[number]))
            for number, scheduler in enumerate(schedulers)
        ]
        by_name: dict[str, list[TensorEntry]] = {}
        for entry in self.index.tensors:
            if entry.section == "optimizer":
                by_name.setdefault(entry.name, []).append(entry)
        for key, parameter in worker.parameters.items():
            place = place_of(self._graph.parameter_by_name[key])
            kept = part.optimizer.setdefault(key, {})
            for entry in by_name.get(place.name, ()):
                alike = entry.shape == place.whole and parameter.dim() > 0
                shape = tuple(parameter.shape) if alike else entry.shape
                offsets = place.offsets if alike else (0,) * len(entry.shape)
                kept[entry.key] = self._block(entry, shape, offsets)
            plain = training.optimizer.values.get(place.name)
            if plain is not None:
                part.values[key] = decode(plain, f"optimizer state of {place.name}")

    def _block(
        self, entry: TensorEntry, shape: tuple[int, ...], offsets: tuple[int, ...]
    ) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=entry.torch_dtype)
        self.pieces.append(
            Piece(entry.section, entry.name, entry.key, entry.shape, offsets, tensor)
        )
        return tensor

    def commit(self) -> None:
        """Takes everything over, once all ranks have read their blocks."""
        seed = self.index.training.seed
        for part in self._parts:
            worker = part.worker
            with torch.no_grad():
                for key, value in part.state.items():
                    worker.state[key].copy_(value)
            worker.zero_gradients()
            if part.match is None:
                continue
            worker.options = replace(worker.options, seed=seed)
            _load_optimizer(part)
            for scheduler, state in part.schedulers:
                scheduler.load_state_dict(state)
            if part.scale is not None and worker.scale is not None:
                worker.scale.load_state_dict(part.scale)


def _load_optimizer(part: _WorkerRestore) -> None:
    optimizer = part.worker.optimizer
    assert optimizer is not None
    key_of = {id(parameter): key for key, parameter in part.worker.parameters.items()}
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group, options in zip(optimizer.param_groups, part.options, strict=True):
        numbers = []
        for parameter in group["params"]:
            key = key_of.get(id(parameter))
            if key is not None:
                kept = {**part.optimizer.get(key, {}), **part.values.get(key, {})}
                if kept:
                    state[number] = kept
            numbers.append(number)
            number += 1
        made = {**options, "params": numbers}
        if "param_names" in group:
            made["param_names"] = group["param_names"]
        groups.append(made)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def check_model(index: Index, graph: ModelGraph, where: str) -> None:
    """Makes sure that a checkpoint is of the model of ``graph``.

    Raises:
        CheckpointError: naming the first parameters and buffers that differ.
    """
    want: dict[str, str] = {}
    for item in graph.parameters:
        if item.persistent:
            place = place_of(item)
            want[place.name] = f"{item.dtype} {list(place.whole)}"
    have = {
        name: f"{entry.dtype} {list(entry.shape)}" for name, entry in index.section("model").items()
    }
    if want == have:
        return
    parts = []
    for text, names in (
        ("not in the checkpoint: ", [name for name in want if name not in have]),
        ("not in the model: ", [name for name in have if name not in want]),
    ):
        if names:
            parts.append(text + _some(names))
    unequal = [
        f"{name} is {have[name]} in the checkpoint and {want[name]} in the model"
        for name in want
        if name in have and want[name] != have[name]
    ]
    if unequal:
        parts.append(_some(unequal))
    raise CheckpointError(
        "The checkpoint is of another model",
        where=where,
        expected=f"the parameters and buffers of {graph.name or 'the model'}",
        got=f"those of {index.model or 'another'}; " + "; ".join(parts),
        fix="Load it into the model that it was saved from",
    )


def _other_buffers(index: Index, graph: ModelGraph) -> dict[str, str]:
    """By name, how a non-persistent buffer differs in shape or dtype from the saved one."""
    saved = index.section("buffer")
    out: dict[str, str] = {}
    for item in graph.parameters:
        entry = None if item.persistent else saved.get(item.name)
        if entry is None:
            continue
        have = f"{entry.dtype} {list(entry.shape)}"
        want = f"{item.dtype} {list(item.shape)}"
        if have != want:
            out[item.name] = f"{item.name} is {have} in the checkpoint and {want} in the model"
    return out


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
