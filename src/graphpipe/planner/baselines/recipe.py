"""What a baseline hands over: stages of units, to be made a plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from graphpipe.cost.cluster import Cluster
from graphpipe.errors import PlanError
from graphpipe.planner.unit_graph import UnitGraph

MOST_MICRO_BATCHES = 1024
"""Smaller micro-batches are not tried: at 1,024 of them the bubble of 32 stages is 3 %, and
each op has long been slower per sample than at twice the size."""

Builder = Literal["kfkb", "gpipe"]


class RecipeStage(NamedTuple):
    """Units on ``replicas`` devices of their own, ``micro_batch`` samples a task."""

    units: tuple[int, ...]
    replicas: int
    micro_batch: int
    recompute: bool = False


class Recipe(NamedTuple):
    """A pipeline as a baseline wants it.

    Attributes:
        stages: Producers before consumers; devices are given out in this order.
        builder: Of the schedule.
        chain: Run as a chain: each stage waits for the one before it, branch or not.
    """

    stages: tuple[RecipeStage, ...]
    builder: Builder = "kfkb"
    chain: bool = True


class SearchTimeoutError(PlanError):
    """A baseline's search was stopped at its time limit."""


class Deadline:
    """A limit on the CPU time that a search takes; ``check`` is called from its loops.

    Args:
        seconds: Of this process's CPU time, from now; None: no limit.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self._start = time.process_time()

    def check(self) -> None:
        """Does nothing until the time is over.

        Raises:
            SearchTimeoutError: from then on.
        """
        if self.seconds is not None and time.process_time() - self._start >= self.seconds:
            self._stop(f"more than {self.seconds:g} s of CPU time")

    def expect(self, done: int, total: int) -> None:
        """Gives up early where what is ``done``, of ``total`` parts alike, leaves no hope.

        Raises:
            SearchTimeoutError: if all would take more than twice the limit.
        """
        whole = (time.process_time() - self._start) * total / max(1, done)
        if self.seconds is not None and whole > 2 * self.seconds:
            self._stop(f"about {whole:.0f} s of CPU time in all, judged after {done} of {total}")

    def _stop(self, got: str) -> None:
        raise SearchTimeoutError(
            "The search was stopped",
            expected=f"an end within {self.seconds:g} s of CPU time",
            got=got,
            fix="Give it more time, or a coarser graph",
        )


class Machines(NamedTuple):
    """The cluster as the baselines see it: equal devices.

    Attributes:
        kind: Of the device; of several kinds, the one that is slowest on the graph.
        memory_bytes: Of the smallest device.
        per_node: Devices of a node where all nodes have the same number, else 1.
        nodes: Number of nodes, or of devices where nodes differ.
        inner: Bytes per second inside a node.
        outer: Bytes per second between nodes; the same as ``inner`` for one node.
    """

    kind: str
    memory_bytes: float
    per_node: int
    nodes: int
    inner: float
    outer: float

    @property
    def devices(self) -> int:
        return self.per_node * self.nodes


FREE = 1e30
"""Bytes per second of a network that takes no time."""


def machines_of(units: UnitGraph, cluster: Cluster) -> Machines:
    """The cluster in the baselines' terms."""
    size = units.costs.micro_batches[len(units.costs.micro_batches) // 2]
    kind = max(cluster.kinds, key=lambda k: (sum(sum(row) for row in units.times(k, size)), k))
    sizes = {len(node) for node in cluster.nodes}
    per_node, nodes = 1, cluster.world_size
    if len(sizes) == 1:
        per_node, nodes = sizes.pop(), len(cluster.nodes)
    net = cluster.network
    inner, outer = net.intra_node_bandwidth or FREE, net.inter_node_bandwidth or FREE
    if len(cluster.nodes) == 1:
        outer = inner
    if per_node == 1:
        inner = outer
    memory = min(device.memory_bytes for device in cluster.devices)
    return Machines(kind, float(memory), per_node, nodes, inner, outer)


def micro_batch_sizes(batch_size: int, *, at_most: int | None = None) -> tuple[int, ...]:
    """Powers of two that give at most ``MOST_MICRO_BATCHES`` micro-batches, descending."""
    largest = batch_size if at_most is None else min(batch_size, at_most)
    sizes = [1 << i for i in range(largest.bit_length()) if 1 << i <= largest]
    return tuple(b for b in reversed(sizes) if -(-batch_size // b) <= MOST_MICRO_BATCHES)


def in_topological_order(
    units: UnitGraph, stages: Sequence[RecipeStage]
) -> tuple[RecipeStage, ...]:
    """The stages with producers first, otherwise by their first unit."""
    owner = {u: i for i, stage in enumerate(stages) for u in stage.units}
    above = [
        {owner[v] for u in stage.units for v in units.predecessors[u]} - {i}
        for i, stage in enumerate(stages)
    ]
    order: list[int] = []
    rest = sorted(range(len(stages)), key=lambda i: stages[i].units[0])
    while rest:
        done = set(order)
        following = next((i for i in rest if above[i] <= done), None)
        assert following is not None, "the stages form a cycle"
        order.append(following)
        rest.remove(following)
    return tuple(stages[i] for i in order)
