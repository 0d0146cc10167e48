"""Series-parallel decomposition of a directed acyclic graph.

The tree says which parts of a graph follow one another (series) and which are
independent (parallel). Only the order that the graph implies counts, not single edges:
the decomposition is that of the transitive closure, so skips, residual edges and the many
readers of one encoder fall away by themselves.

An order is series-parallel if it has no N (a < c, b < c, b < d and nothing else between
the four). Where a region has one, the region is cut in two at the place that lengthens
its critical path least and the halves are put in series: the tree then holds some
precedence that the graph doesn't ask for, and never misses one that it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Leaf:
    """One node of the graph."""

    node: int


@dataclass(frozen=True)
class Series:
    """Children in order: all of one precedes all of the next."""

    children: tuple[Tree, ...]
    forced: bool = False
    """Whether some of the precedence was added to make the region series-parallel."""


@dataclass(frozen=True)
class Parallel:
    """Children without any path between them, ordered by their first node."""

    children: tuple[Tree, ...]


Tree = Leaf | Series | Parallel


def leaves(tree: Tree) -> tuple[int, ...]:
    """The nodes of the tree from left to right: a topological order, branch after branch."""
    out: list[int] = []
    stack: list[Tree] = [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, Leaf):
            out.append(item.node)
        else:
            stack.extend(reversed(item.children))
    return tuple(out)


def is_exact(tree: Tree) -> bool:
    """Whether the tree says exactly what the graph says (no precedence was added)."""
    stack: list[Tree] = [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, Series) and item.forced:
            return False
        if not isinstance(item, Leaf):
            stack.extend(item.children)
    return True


def decompose(
    predecessors: Sequence[Sequence[int]], weights: Sequence[float] | None = None
) -> Tree:
    """The series-parallel tree of a graph.

    Args:
        predecessors: For each node its direct predecessors; every predecessor has a lower
            number than the node (numbers are a topological order).
        weights: Time of each node, by which the critical path is measured where a region has
            to be made series-parallel; 1 each by default.

    Returns:
        The tree; nested series and nested parallels are flattened. No recursion: graphs of
        any depth work. Time O(n^2 / 64) for each level of the tree.
    """
    count = len(predecessors)
    assert count > 0
    work = _Decomposition(predecessors, weights if weights is not None else [1.0] * count)
    return work.tree(list(range(count)))


@dataclass
class _Node:
    """A node of the tree under construction."""

    region: list[int]
    children: list[_Node] | None = None
    series: bool = False
    forced: bool = False


class _Decomposition:
    def __init__(self, predecessors: Sequence[Sequence[int]], weights: Sequence[float]) -> None:
        self.preds = [sorted(set(items)) for items in predecessors]
        self.weights = list(weights)
        for node, items in enumerate(self.preds):
            assert not items or (items[0] >= 0 and items[-1] < node), "not a topological order"

    def tree(self, region: list[int]) -> Tree:
        root = _Node(region)
        pending = [root]
        order = []
        while pending:
            node = pending.pop()
            order.append(node)
            if len(node.region) == 1:
                continue
            parts = self._components(node.region)
            node.series = len(parts) == 1
            if node.series:
                parts = self._series(node.region)
                if len(parts) == 1:
                    parts = self._least_cost_cut(node.region)
                    node.forced = True
            node.children = [_Node(part) for part in parts]
            pending.extend(node.children)
        built: dict[int, Tree] = {}
        for node in reversed(order):
            built[id(node)] = self._finish(node, built)
        return built[id(root)]

    @staticmethod
    def _finish(node: _Node, built: dict[int, Tree]) -> Tree:
        if node.children is None:
            return Leaf(node.region[0])
        forced = node.forced
        flat: list[Tree] = []
        for child in node.children:
            tree = built[id(child)]
            if node.series and isinstance(tree, Series):
                forced |= tree.forced
                flat.extend(tree.children)
            elif not node.series and isinstance(tree, Parallel):
                flat.extend(tree.children)
            else:
                flat.append(tree)
        return Series(tuple(flat), forced) if node.series else Parallel(tuple(flat))

    def _components(self, region: list[int]) -> list[list[int]]:
        """Weakly connected components, each ascending, ordered by their first node."""
        parent = {node: node for node in region}

        def find(item: int) -> int:
            while parent[item] != item:
                parent[item] = parent[parent[item]]
                item = parent[item]
            return item

        for node in region:
            for source in self.preds[node]:
                if source in parent:
                    a, b = find(node), find(source)
                    if a != b:
                        parent[max(a, b)] = min(a, b)
        parts: dict[int, list[int]] = {}
        for node in region:
            parts.setdefault(find(node), []).append(node)
        return [parts[root] for root in sorted(parts)]

    def _series(self, region: list[int]) -> list[list[int]]:
        """Cuts the region wherever everything before precedes everything after.

        With nodes in topological order, a cut at p is one if each node from p on has all
        of the first p nodes among its ancestors; so the lowest ancestor that each node
        lacks, and the minimum of these from the right, decide every p at once.
        """
        place = {node: p for p, node in enumerate(region)}
        reach: list[int] = []
        lacking: list[int] = []
        for node in region:
            bits = 0
            for source in self.preds[node]:
                p = place.get(source)
                if p is not None:
                    bits |= reach[p] | (1 << p)
            reach.append(bits)
            lacking.append((~bits & (bits + 1)).bit_length() - 1)
        cuts = []
        lowest = len(region)
        for p in range(len(region) - 1, 0, -1):
            lowest = min(lowest, lacking[p])
            if lowest >= p:
                cuts.append(p)
        edges = [0, *reversed(cuts), len(region)]
        return [region[a:b] for a, b in pairwise(edges)]

    def _least_cost_cut(self, region: list[int]) -> list[list[int]]:
        """Two halves in series, where that lengthens the critical path least.

        Tried are all prefixes of two orders: by distance from the sources (cuts straight
        through parallel strands) and the region's own order. Among equals the cut nearest
        to the middle of the work wins.
        """
        top: dict[int, float] = {}
        for node in region:
            inside = [top[s] for s in self.preds[node] if s in top]
            top[node] = max(inside, default=0.0) + self.weights[node]
        bottom = dict.fromkeys(region, 0.0)
        for node in reversed(region):
            bottom[node] += self.weights[node]
            for source in self.preds[node]:
                if source in bottom:
                    bottom[source] = max(bottom[source], bottom[node])
        total = sum(self.weights[node] for node in region)
        best: tuple[float, float, list[int], int] | None = None
        for order in (sorted(region, key=lambda node: (top[node], node)), region):
            after = [0.0] * (len(order) + 1)
            for p in range(len(order) - 1, -1, -1):
                after[p] = max(after[p + 1], bottom[order[p]])
            before = work = 0.0
            for p in range(1, len(order)):
                before = max(before, top[order[p - 1]])
                work += self.weights[order[p - 1]]
                key = (before + after[p], abs(total - 2 * work))
                if best is None or key < best[:2]:
                    best = (*key, order, p)
        assert best is not None
        _, _, order, p = best
        return [sorted(order[:p]), sorted(order[p:])]
