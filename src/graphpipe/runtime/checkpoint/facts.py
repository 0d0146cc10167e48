"""Everything of training that is no tensor of the model: options, schedules, random states.

Parameter groups and schedulers differ between ranks, since each rank's optimizer has its own
parameters only. They are saved by parameter: a group of another plan takes the options, and
what a scheduler keeps for a group, from the parameters that are in it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from graphpipe.errors import CheckpointError
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.runtime.checkpoint.index import GroupEntry, OptimizerEntry
from graphpipe.runtime.checkpoint.pieces import place_of
from graphpipe.runtime.checkpoint.values import decode, encode
from graphpipe.runtime.worker import Worker

_PER_GROUP = frozenset(
    ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
)
"""Lists in the state of torch's schedulers that have one item for each parameter group."""
_SPLIT = "per_group"


def names_of(worker: Worker, graph: ModelGraph) -> dict[int, str]:
    """By ``id`` of a parameter of the worker, the name that it has in the model."""
    return {
        id(parameter): place_of(graph.parameter_by_name[key]).name
        for key, parameter in worker.parameters.items()
    }


# --- the optimizer ----------------------------------------------------------------------


def optimizer_facts(
    worker: Worker, graph: ModelGraph, schedulers: Sequence[Any]
) -> tuple[OptimizerEntry | None, list[dict[str, Any]]]:
    """A worker's optimizer without its tensors, and the schedulers' common states."""
    common: list[dict[str, Any]] = []
    apart: list[list[dict[str, Any]]] = []
    count = 0 if worker.optimizer is None else len(worker.optimizer.param_groups)
    for number, scheduler in enumerate(schedulers):
        state, groups = _apart(scheduler.state_dict(), count)
        where = f"scheduler {number}"
        common.append(encode(state, where))
        apart.append([encode(group, where) for group in groups])
    if worker.optimizer is None:
        return None, common
    names = names_of(worker, graph)
    entries = []
    for position, group in enumerate(worker.optimizer.param_groups):
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        entries.append(
            GroupEntry(
                position=position,
                options=encode(options, f"parameter group {position}"),
                schedule=tuple(item[position] for item in apart),
                parameters=tuple(sorted({names[id(p)] for p in group["params"] if id(p) in names})),
            )
        )
    values: dict[str, dict[str, Any]] = {}
    for parameter, kept in worker.optimizer.state.items():
        name = names.get(id(parameter))
        plain = {k: v for k, v in kept.items() if not isinstance(v, torch.Tensor)}
        if name is not None and plain:
            values[name] = encode(plain, f"optimizer state of {name}")
    kind = type(worker.optimizer).__name__
    return OptimizerEntry(type=kind, groups=tuple(entries), values=values), common


def merged_optimizer(entries: Sequence[OptimizerEntry | None]) -> OptimizerEntry | None:
    """The optimizers of all ranks as one: groups that are alike in everything are one group."""
    found = [entry for entry in entries if entry is not None]
    if not found:
        return None
    groups: dict[str, GroupEntry] = {}
    values: dict[str, dict[str, Any]] = {}
    for entry in found:
        values.update(entry.values)
        for group in entry.groups:
            key = json.dumps([group.position, group.options, group.schedule], sort_keys=True)
            known = groups.get(key, group)
            names = tuple(sorted({*known.parameters, *group.parameters}))
            groups[key] = known.model_copy(update={"parameters": names})
    ordered = sorted(groups.values(), key=lambda group: group.position)
    return OptimizerEntry(type=found[0].type, groups=tuple(ordered), values=values)


class GroupMatch:
    """Which saved group each group of a worker's optimizer goes on from.

    Raises:
        CheckpointError: if the optimizer is of another kind, trains a parameter that the
            saved one did not, or puts parameters together that had different options.
    """

    def __init__(self, worker: Worker, graph: ModelGraph, saved: OptimizerEntry) -> None:
        optimizer = worker.optimizer
        assert optimizer is not None
        kind = type(optimizer).__name__
        if kind != saved.type:
            raise CheckpointError(
                "The checkpoint was saved with another optimizer",
                expected=kind,
                got=saved.type,
                fix="Use the same optimizer, or load with model_only=True",
            )
        self._owner = {name: group for group in saved.groups for name in group.parameters}
        names = names_of(worker, graph)
        self.groups = [
            self._match(position, [names[id(p)] for p in group["params"] if id(p) in names], saved)
            for position, group in enumerate(optimizer.param_groups)
        ]

    def _match(self, position: int, names: Sequence[str], saved: OptimizerEntry) -> GroupEntry:
        if not names:  # a placeholder, or a group that is empty on this rank
            alike = [group for group in saved.groups if group.position == position]
            return (alike or saved.groups)[0]
        found: GroupEntry | None = None
        for name in names:
            group = self._owner.get(name)
            if group is None:
                raise CheckpointError(
                    "The optimizer trains a parameter that the saved one did not",
                    where=name,
                    fix="Freeze the same parameters as before, or load with model_only=True",
                )
            if found is not None and (group.options, group.schedule) != (
                found.options,
                found.schedule,
            ):
                raise CheckpointError(
                    "A parameter group holds parameters that were saved with different options",
                    where=f"parameter group {position}: {names[0]} and {name}",
                    fix="Group the parameters as before, or load with model_only=True",
                )
            found = group
        assert found is not None
        return found

    def options(self) -> list[dict[str, Any]]:
        """Options of each group."""
        return [
            decode(group.options, f"options of parameter group {group.position}")
            for group in self.groups
        ]

    def scheduler_state(self, number: int, common: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a scheduler for these groups."""
        where = f"scheduler {number}"
        groups = []
        for group in self.groups:
            if number >= len(group.schedule):
                raise CheckpointError("The checkpoint lacks part of a scheduler", where=where)
            groups.append(decode(group.schedule[number], where))
        state = _together(decode(dict(common), where), groups, where)
        assert isinstance(state, dict)
        return state


def _apart(state: Any, count: int) -> tuple[Any, list[dict[str, Any]]]:
    """A scheduler's state without what it keeps for each group, and that, by path."""
    groups: list[dict[str, Any]] = [{} for _ in range(count)]

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, list):
            return [walk(item, f"{path}/{i}") for i, item in enumerate(value)]
        if type(value) is not dict:
            return value
        out = {}
        for key, item in value.items():
            here = f"{path}/{key}"
            if key in _PER_GROUP and isinstance(item, list) and len(item) == count:
                for group, part in zip(groups, item, strict=True):
                    group[here] = part
                out[key] = {_SPLIT: here}
            else:
                out[key] = walk(item, here)
        return out

    return walk(state, ""), groups


def _together(state: Any, groups: Sequence[Mapping[str, Any]], where: str) -> Any:
    if isinstance(state, list):
        return [_together(item, groups, where) for item in state]
    if type(state) is not dict:
        return state
    if state.keys() == {_SPLIT}:
        path = state[_SPLIT]
        if any(path not in group for group in groups):
            raise CheckpointError("The checkpoint lacks part of a scheduler", where=where)
        return [group[path] for group in groups]
    return {key: _together(item, groups, where) for key, item in state.items()}


def schedulers_of(
    worker: Worker, schedulers: Sequence[Any], workers: Sequence[Worker]
) -> list[Any]:
    """The schedulers of a worker's optimizer, in order.

    Raises:
        CheckpointError: if one belongs to no optimizer of this process.
    """
    known = {id(w.optimizer) for w in workers if w.optimizer is not None}
    out = []
    for number, scheduler in enumerate(schedulers):
        owner = getattr(scheduler, "optimizer", worker.optimizer)
        if id(owner) not in known:
            raise CheckpointError(
                "A scheduler does not belong to an optimizer of this pipeline",
                where=f"scheduler {number}",
                expected="a scheduler built on pipe.optimizer",
            )
        if owner is worker.optimizer:
            out.append(scheduler)
    return out


# --- random generators ------------------------------------------------------------------


def random_facts(device: torch.device) -> dict[str, Any]:
    """States of the generators that user code draws from (ours are seeded by step)."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    found: dict[str, Any] = encode(states, "random states")
    return found


def restore_random(saved: Mapping[str, Any], device: torch.device) -> None:
    """Puts the generators where they were.

    Raises:
        CheckpointError: if a state is not one.
    """
    states = decode(dict(saved), "random states")
    try:
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        if "cuda" in states and device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], device)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"A random state in the checkpoint is malformed: {error}", where="random states"
        ) from None
