"""Random graphs and brute force that the tests of the baselines share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from random import Random

Edges = tuple[tuple[int, int], ...]


def random_edges(random: Random, nodes: int, density: float = 0.4) -> Edges:
    """Edges from lower to higher numbers."""
    return tuple((a, b) for a, b in combinations(range(nodes), 2) if random.random() < density)


def all_down_sets(nodes: int, edges: Edges) -> list[frozenset[int]]:
    """Every set that holds the predecessors of its members, by trying all sets."""
    return [
        frozenset(members)
        for size in range(nodes + 1)
        for members in combinations(range(nodes), size)
        if all(a in members for a, b in edges if b in members)
    ]


def chains_of_stages(nodes: int, edges: Edges) -> Iterator[tuple[frozenset[int], ...]]:
    """Every way to cut the graph into a sequence of stages."""
    sets = all_down_sets(nodes, edges)
    everything = frozenset(range(nodes))

    def extend(done: frozenset[int]) -> Iterator[tuple[frozenset[int], ...]]:
        if done == everything:
            yield ()
            return
        for larger in sets:
            if done < larger:
                for rest in extend(larger):
                    yield (larger - done, *rest)

    return extend(frozenset())


def splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to give ``parts`` stages at least one of ``total`` devices each, all used."""
    for cuts in combinations(range(1, total), parts - 1):
        edges: Sequence[int] = (0, *cuts, total)
        yield tuple(b - a for a, b in pairwise(edges))
