"""Coarsening: thousands of operators become the few hundred units that a planner moves.

A unit is a set of ops that every plan keeps in one stage. Merging keeps the graph of
units acyclic (so every unit is convex), keeps atomic groups whole, and never makes a unit
much heavier than the grain that was asked for, unless a rule forces ops together.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

from graphpipe.graph.model_graph import ModelGraph

_CHEAP = 0.5
"""Share of the grain by which cheap ops may make a heavy one heavier."""


def forced_groups(
    graph: ModelGraph, together: Iterable[Iterable[int]] = ()
) -> tuple[tuple[int, ...], ...]:
    """The finest legal units: ops that a rule forces to share a stage, in topological order.

    Forced together are: the members of an atomic group, an op whose output cannot be sent
    and its readers, every set in ``together`` (positions in ``graph.ops``), and whatever
    lies on a path between two members of a unit (else the stage could not be convex).
    Prep ops belong to no unit: each stage that reads one computes it itself.

    Returns:
        Disjoint tuples of op positions, each ascending.
    """
    ops = graph.ops
    parent = list(range(len(ops)))

    def find(item: int) -> int:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def union(left: int, right: int) -> None:
        left, right = find(left), find(right)
        if left != right:
            parent[max(left, right)] = min(left, right)

    first_of_group: dict[int, int] = {}
    for i, op in enumerate(ops):
        if op.prep:
            continue
        if op.group is not None:
            union(i, first_of_group.setdefault(op.group, i))
        if not op.crossable:
            for reader in graph.successors[i]:
                if not ops[reader].prep:
                    union(i, reader)
    for members in together:
        kept = [i for i in members if not ops[i].prep]
        for left, right in pairwise(kept):
            union(left, right)

    real = [i for i, op in enumerate(ops) if not op.prep]
    edges = [(find(j), find(i)) for i in real for j in graph.predecessors[i] if not ops[j].prep]
    # Contracting may close cycles; what lies on a cycle has to be one unit.
    label = _strong_components(len(ops), edges)
    members_of: dict[int, list[int]] = {}
    for i in real:
        members_of.setdefault(label[find(i)], []).append(i)
    return _topological([tuple(members) for members in members_of.values()], graph)


def _strong_components(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    rows = [a for a, b in edges if a != b]
    columns = [b for a, b in edges if a != b]
    matrix = csr_matrix((np.ones(len(rows), dtype=np.int8), (rows, columns)), shape=(count, count))
    _, labels = connected_components(matrix, directed=True, connection="strong")
    return [int(item) for item in labels]


def _topological(
    groups: Sequence[tuple[int, ...]], graph: ModelGraph
) -> tuple[tuple[int, ...], ...]:
    """The groups in a topological order of their graph; ties by their first op."""
    owner = {op: g for g, members in enumerate(groups) for op in members}
    preds: list[set[int]] = [set() for _ in groups]
    succs: list[set[int]] = [set() for _ in groups]
    for op, g in owner.items():
        for source in graph.predecessors[op]:
            h = owner.get(source, g)
            if h != g:
                preds[g].add(h)
                succs[h].add(g)
    waiting = [len(items) for items in preds]
    ready = [(groups[g][0], g) for g, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order: list[tuple[int, ...]] = []
    while ready:
        _, g = heapq.heappop(ready)
        order.append(groups[g])
        for h in succs[g]:
            waiting[h] -= 1
            if waiting[h] == 0:
                heapq.heappush(ready, (groups[h][0], h))
    assert len(order) == len(groups), "the graph of units has a cycle"
    return tuple(order)


def coarsen(
    graph: ModelGraph,
    weights: Sequence[float],
    *,
    grain: float,
    edge_bytes: Sequence[float] | None = None,
    together: Iterable[Iterable[int]] = (),
    apart: Mapping[int, int] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Merges cheap ops into neighbours.

    Two units are merged where the contraction provably closes no cycle: along an edge
    that is the only one out of its source or the only one into its target (any second
    path would need another), or when they read the same units and are read by the same
    units (twins, such as the query, key and value projections). A merge never makes a
    heavy unit wait for a branch that it does not depend on.

    Args:
        graph: The graph.
        weights: For every op its share of what is scarce (time, memory), any unit.
        grain: No merged unit gets heavier than this; what is heavier by itself may be joined by
            ops that come to half of it.
        edge_bytes: For every op the bytes that its output would cost to send; among equally
            good merges the one that hides more bytes wins.
        together: Sets of op positions that must share a unit.
        apart: Labels of op positions; units with different labels are never merged (an op
            without a label merges with any).

    Returns:
        Units as ascending tuples of op positions, in a topological order of the units.
    """
    units = list(forced_groups(graph, together))
    labels = apart or {}
    return _Merger(graph, units, weights, edge_bytes, labels).run(grain)


class _Merger:
    def __init__(
        self,
        graph: ModelGraph,
        units: list[tuple[int, ...]],
        weights: Sequence[float],
        edge_bytes: Sequence[float] | None,
        labels: Mapping[int, int],
    ) -> None:
        self.graph = graph
        self.members: dict[int, list[int]] = {u: list(ops) for u, ops in enumerate(units)}
        self.weight = {u: sum(weights[op] for op in ops) for u, ops in enumerate(units)}
        self.core = dict(self.weight)  # the heaviest of the units that each was made of
        self.label: dict[int, frozenset[int]] = {
            u: frozenset(labels[op] for op in ops if op in labels) for u, ops in enumerate(units)
        }
        owner = {op: u for u, ops in enumerate(units) for op in ops}
        self.preds: dict[int, dict[int, float]] = {u: {} for u in self.members}
        self.succs: dict[int, dict[int, float]] = {u: {} for u in self.members}
        for op, u in owner.items():
            for source in graph.predecessors[op]:
                v = owner.get(source, u)
                if v != u:
                    size = edge_bytes[source] if edge_bytes is not None else 0.0
                    total = self.preds[u].get(v, 0.0) + size
                    self.preds[u][v] = self.succs[v][u] = total
        # Ops above each op, as bits; those above a unit are the union, however it grows.
        above: list[int] = []
        for sources in graph.predecessors:
            bits = 0
            for source in sources:
                bits |= above[source] | (1 << source)
            above.append(bits)
        self.above = {u: self._union([above[op] for op in ops]) for u, ops in self.members.items()}
        self.bits = {u: self._union([1 << op for op in ops]) for u, ops in self.members.items()}

    @staticmethod
    def _union(items: list[int]) -> int:
        out = 0
        for item in items:
            out |= item
        return out

    def _delays(self, a: int, b: int, cheap: float) -> bool:
        """Whether merging along the edge a -> b makes real work of a wait for what only b needs
        (a tower for the concatenation of all towers), or in the backward b for other readers
        of a."""
        if self.weight[a] > cheap and any(
            q != a and not self.bits[q] & self.above[a] for q in self.preds[b]
        ):
            return True
        return self.weight[b] > cheap and any(
            t != b and not self.bits[b] & self.above[t] for t in self.succs[a]
        )

    def run(self, grain: float) -> tuple[tuple[int, ...], ...]:
        self._merge_twins(grain)
        heap = [(weight, u) for u, weight in self.weight.items()]
        heapq.heapify(heap)
        stuck: list[int] = []
        while heap:
            weight, u = heapq.heappop(heap)
            if u not in self.members or self.weight[u] != weight:
                continue
            if weight > grain:
                break
            partner = self._partner(u, grain)
            if partner is None:
                stuck.append(u)
                continue
            touched = self._merge(u, partner)
            heapq.heappush(heap, (self.weight[touched], touched))
            # A merge may free neighbours that had no safe partner before.
            around = [*self.preds[touched], *self.succs[touched]]
            if stuck and len(around) <= 16:
                again = set(around) & set(stuck)
                for v in sorted(again):
                    heapq.heappush(heap, (self.weight[v], v))
                stuck = [v for v in stuck if v not in again]
        self._merge_twins(grain)
        return _topological([tuple(sorted(ops)) for ops in self.members.values()], self.graph)

    def _fits(self, u: int, v: int, grain: float) -> bool:
        heaviest = max(self.core[u], self.core[v])
        if self.weight[u] + self.weight[v] > max(grain, heaviest + _CHEAP * grain):
            return False
        return len(self.label[u] | self.label[v]) <= 1 or self.label[u] == self.label[v]

    def _partner(self, u: int, grain: float) -> int | None:
        """The best unit to merge u with, or None; a negligible unit may join a heavy one."""
        best: tuple[float, float, int, int] | None = None
        only_pred, only_succ = len(self.preds[u]) == 1, len(self.succs[u]) == 1
        for after, side in ((False, self.preds[u]), (True, self.succs[u])):
            for v, size in side.items():
                single = only_succ if after else only_pred
                if not single:
                    single = len(self.preds[v]) == 1 if after else len(self.succs[v]) == 1
                if not single or not self._fits(u, v, grain):
                    continue
                if self._delays(*((u, v) if after else (v, u)), _CHEAP * grain):
                    continue
                # Balanced merges first; then hide the larger message; then the producer.
                both = self.weight[u] + self.weight[v]
                key = (0.0 if self.weight[u] <= _CHEAP * grain else both, -size, int(after), v)
                if best is None or key < best:
                    best = key
        return None if best is None else best[3]

    def _merge(self, u: int, v: int) -> int:
        """Contracts v into u or u into v (the one with more edges stays); returns who stayed."""
        degree_u = len(self.preds[u]) + len(self.succs[u])
        if degree_u < len(self.preds[v]) + len(self.succs[v]):
            u, v = v, u
        self.members[u] += self.members.pop(v)
        self.weight[u] += self.weight.pop(v)
        self.label[u] |= self.label.pop(v)
        self.core[u] = max(self.core[u], self.core.pop(v))
        self.above[u] |= self.above.pop(v)
        self.bits[u] |= self.bits.pop(v)
        for mine, theirs in ((self.preds, self.succs), (self.succs, self.preds)):
            for w, size in mine.pop(v).items():
                del theirs[w][v]
                if w != u:
                    total = mine[u].get(w, 0.0) + size
                    mine[u][w] = theirs[w][u] = total
        return u

    def _merge_twins(self, grain: float) -> None:
        """Merges units with the same readers and sources, lightest first, up to the grain."""
        families: dict[tuple[frozenset[int], frozenset[int]], list[int]] = {}
        for u in self.members:
            families.setdefault((frozenset(self.preds[u]), frozenset(self.succs[u])), []).append(u)
        for family in families.values():
            open_unit: int | None = None
            for u in sorted(family, key=lambda item: (self.weight[item], item)):
                if open_unit is not None and self._fits_twin(open_unit, u, grain):
                    open_unit = self._merge(open_unit, u)
                else:
                    open_unit = u

    def _fits_twin(self, u: int, v: int, grain: float) -> bool:
        return self.weight[u] + self.weight[v] <= grain and len(self.label[u] | self.label[v]) <= 1
