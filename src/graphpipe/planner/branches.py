"""The trunk of a model and its branches: what a device that hosts several stages is shared by.

A model with encoders has places where independent inputs meet: image tokens and text before a
decoder. All that depends on such a place is the *trunk*, what remains falls into *branches*,
the connected pieces before it. A model without such a place is a trunk alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphpipe.planner.unit_graph import UnitGraph

_LIGHT = 0.01
"""Branches with less than this share of the work (an embedding) go with the trunk."""


class Split(NamedTuple):
    """``trunk`` and ``branches``: units in a topological order, every unit in one of them.

    Nothing in a branch depends on the trunk or on another branch.
    """

    trunk: tuple[int, ...]
    branches: tuple[tuple[int, ...], ...]


def splits(units: UnitGraph, work: Sequence[float], least: float = 0.5) -> list[Split]:
    """Ways to tell a trunk from branches, the one with the most work in branches first.

    Args:
        units: The units.
        work: Work of each unit.
        least: Share of the work that a trunk must have.

    Returns:
        Splits with at least one branch that is not light; where there is none, the model as
        a trunk alone.
    """
    count, total = len(units), sum(work)
    found: dict[Split, float] = {}
    for unit in _meetings(units):
        below = _below(units, unit)
        trunk_work = sum(work[u] for u in below)
        if trunk_work < least * total:
            continue
        rest = [u for u in range(count) if u not in below]
        trunk = sorted(below)
        branches = []
        for piece in _connected(units, rest):
            if sum(work[u] for u in piece) < _LIGHT * total:
                # It comes first: nothing that it reads can lie behind.
                trunk = [*piece, *trunk]
            else:
                branches.append(tuple(piece))
        if branches:
            split = Split(tuple(trunk), tuple(branches))
            found[split] = sum(work[u] for piece in branches for u in piece)
    if not found:
        return [Split(tuple(range(count)), ())]
    return sorted(found, key=lambda split: (-found[split], split))


def _meetings(units: UnitGraph) -> list[int]:
    """Units at which inputs meet for the first time, or behind which gradients end."""
    labels: list[frozenset[int | str]] = []
    out = []
    inputs = _inputs(units)
    for u, sources in enumerate(units.predecessors):
        own = inputs[u] or (frozenset() if sources else frozenset({u}))
        seen: frozenset[int | str] = own.union(*(labels[s] for s in sources))
        labels.append(seen)
        parts = [labels[s] for s in sources] + ([own] if own else [])
        first_meeting = len(seen) > max(len(part) for part in parts)
        thawed = units.has_backward[u] and any(not units.has_backward[s] for s in sources)
        if sources and (first_meeting or thawed):
            out.append(u)
    return out


def _inputs(units: UnitGraph) -> list[frozenset[int | str]]:
    """Model inputs that each unit reads, itself or through prep ops."""
    graph = units.graph
    inputs = {item.name for item in graph.inputs}
    reads: dict[str, frozenset[int | str]] = {}
    for op in graph.ops:
        found: frozenset[int | str] = frozenset(name for name in op.inputs if name in inputs)
        if op.prep:
            found = found.union(*(reads.get(name, frozenset()) for name in op.inputs))
            reads[op.name] = found
        else:
            reads[op.name] = frozenset()
    out: list[frozenset[int | str]] = []
    for ops in units.members:
        found = frozenset()
        for index in ops:
            names = graph.ops[index].inputs
            found = found.union(
                (name for name in names if name in inputs),
                *(reads[name] for name in names if name in reads),
            )
        out.append(found)
    return out


def _below(units: UnitGraph, unit: int) -> set[int]:
    """The unit and all that depends on it."""
    out = {unit}
    for u in range(unit + 1, len(units)):
        if any(s in out for s in units.predecessors[u]):
            out.add(u)
    return out


def _connected(units: UnitGraph, members: Sequence[int]) -> list[list[int]]:
    """Connected pieces, ignoring directions; each ascending."""
    home = {u: u for u in members}

    def find(u: int) -> int:
        while home[u] != u:
            home[u] = home[home[u]]
            u = home[u]
        return u

    for u in members:
        for s in units.predecessors[u]:
            if s in home:
                a, b = find(s), find(u)
                home[max(a, b)] = min(a, b)
    pieces: dict[int, list[int]] = {}
    for u in members:
        pieces.setdefault(find(u), []).append(u)
    return list(pieces.values())
