"""Down-sets of a directed acyclic graph, as bit sets in numpy.

A down-set holds, with every node, all predecessors of that node. A pipeline of stages
without a cycle is exactly a chain of down-sets, each stage the difference of two
neighbours; so both PipeDream's antichain states and Piper's ideals are down-sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from graphpipe.errors import PlanError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.intp]

DOWN_SET_LIMIT = 40_000
"""Largest number of down-sets that Piper's program accepts."""


class DownSetLimitError(PlanError):
    """The graph has too many down-sets for a dynamic programme over all of them."""


@dataclass(frozen=True, eq=False)
class DownSets:
    """All down-sets of a graph, by size and then by bit pattern: 0 is empty, the last is all.

    Attributes:
        members: [sets, nodes], 1.0 where the set holds the node.
        words: [sets, ceil(nodes / 64)], the same as bits.
        first_of_size: ``first_of_size[c]`` is the position of the first set of c nodes.
    """

    members: FloatArray
    words: npt.NDArray[np.uint64]
    first_of_size: IntArray

    def __len__(self) -> int:
        return int(self.members.shape[0])

    def size(self, index: int) -> int:
        """Nodes of set number ``index``."""
        return int(self._sizes[index])

    @cached_property
    def _sizes(self) -> IntArray:
        return np.asarray(self.members.sum(axis=1), dtype=np.intp)

    def supersets(self, indices: IntArray) -> npt.NDArray[np.bool_]:
        """[indices, sets]: whether each set holds all of each indexed set (itself included)."""
        return np.asarray(self._inside[indices])

    def below(self, index: int) -> IntArray:
        """Positions of the strict subsets of set number ``index``, ascending."""
        size = int(self.members[index].sum())
        candidates = self.words[: self.first_of_size[size]]
        outside = ~self.words[index]
        inside = (candidates[:, 0] & outside[0]) == 0
        for word in range(1, self.words.shape[1]):
            inside &= (candidates[:, word] & outside[word]) == 0
        return np.flatnonzero(inside)

    @cached_property
    def _inside(self) -> npt.NDArray[np.bool_]:
        """[lower, upper]: whether set ``lower`` is a subset of set ``upper``."""
        inside = np.zeros((len(self), len(self)), dtype=bool)
        for upper in range(len(self)):
            inside[self.below(upper), upper] = True
            inside[upper, upper] = True
        return inside

    @cached_property
    def _around(self) -> npt.NDArray[np.bool_]:
        """[upper, lower]: the transpose, contiguous."""
        return np.ascontiguousarray(self._inside.T)

    def above(self, index: int) -> IntArray:
        """Positions of the strict supersets of set number ``index``, ascending."""
        if index == 0:
            return np.arange(1, len(self))
        return np.flatnonzero(self._inside[index, index + 1 :]) + index + 1

    def between(self, lower: int, upper: int) -> IntArray:
        """Positions of set ``lower`` and of the sets between it and ``upper``, ascending."""
        if lower == 0:
            return self.below(upper)
        both = self._inside[lower, lower:upper] & self._around[upper, lower:upper]
        return np.flatnonzero(both) + lower

    def sums(self, weights: npt.ArrayLike) -> FloatArray:
        """The sum of ``weights`` ([nodes] or [nodes, columns]) over the members of each set."""
        return np.asarray(self.members @ np.asarray(weights, dtype=np.float64))

    def nodes_between(self, lower: int, upper: int) -> tuple[int, ...]:
        """The nodes of set ``upper`` that are not in set ``lower``, ascending."""
        difference = self.members[upper] - self.members[lower]
        return tuple(int(node) for node in np.flatnonzero(difference > 0.5))


def enumerate_down_sets(
    node_count: int, edges: Sequence[tuple[int, int]], *, limit: int = DOWN_SET_LIMIT
) -> DownSets:
    """All down-sets of the graph with these nodes and (source, target) edges.

    Raises:
        DownSetLimitError: if there are more than ``limit``.
    """
    predecessors = [0] * node_count
    successors: list[list[int]] = [[] for _ in range(node_count)]
    for source, target in sorted(set(edges)):
        predecessors[target] |= 1 << source
        successors[source].append(target)

    sources = sum(1 << node for node in range(node_count) if not predecessors[node])
    # One level holds the sets of one size, each with the nodes that may join it next.
    level: dict[int, int] = {0: sources}
    ordered: list[int] = []
    while level:
        if len(ordered) + len(level) > limit:
            raise DownSetLimitError(
                "The graph has too many down-sets for this planner",
                where=f"{node_count} nodes",
                expected=f"at most {limit}",
                got=f"more than {len(ordered) + len(level)} (search not finished)",
                fix="Coarsen the graph first, for instance by fusing chains",
            )
        ordered.extend(sorted(level))
        following: dict[int, int] = {}
        for members, ready in level.items():
            rest = ready
            while rest:
                bit = rest & -rest
                rest ^= bit
                grown = members | bit
                if grown in following:
                    continue
                now_ready = ready ^ bit
                for target in successors[bit.bit_length() - 1]:
                    if predecessors[target] & ~grown == 0:
                        now_ready |= 1 << target
                following[grown] = now_ready
        level = following

    width = max(1, -(-node_count // 64))
    raw = b"".join(members.to_bytes(8 * width, "little") for members in ordered)
    words = np.frombuffer(raw, dtype="<u8").reshape(len(ordered), width).astype(np.uint64)
    bits = np.unpackbits(
        np.frombuffer(raw, dtype=np.uint8).reshape(len(ordered), 8 * width),
        axis=1,
        count=node_count,
        bitorder="little",
    )
    sizes = bits.sum(axis=1, dtype=np.intp)
    first = np.searchsorted(sizes, np.arange(node_count + 2)).astype(np.intp)
    return DownSets(members=bits.astype(np.float64), words=words, first_of_size=first)
