"""Plain baselines: data parallelism, and GPipe and 1F1B with cuts of equal work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphpipe.graph.series_parallel import decompose, leaves
from graphpipe.planner.baselines.inputs import unit_seconds
from graphpipe.planner.baselines.recipe import (
    Builder,
    Machines,
    Recipe,
    RecipeStage,
    micro_batch_sizes,
)
from graphpipe.planner.unit_graph import UnitGraph


def data_parallel(units: UnitGraph, machines: Machines, batch_size: int) -> Iterator[Recipe]:
    """The whole model on every device, gradients reduced over all.

    Where there are more devices than samples, the rest stays idle.
    """
    replicas = min(machines.devices, batch_size)
    everything = tuple(range(len(units)))
    for size in micro_batch_sizes(batch_size, at_most=-(-batch_size // replicas)):
        yield Recipe((RecipeStage(everything, replicas, size),))


def gpipe(units: UnitGraph, machines: Machines, batch_size: int) -> Iterator[Recipe]:
    """GPipe (Huang et al., NeurIPS 2019): a chain with cuts of equal work, a device each, all
    forwards before all backwards; every stage keeps its inputs only and recomputes."""
    yield from _equal_chain(units, machines, batch_size, "gpipe", recompute=True)


def one_f_one_b(units: UnitGraph, machines: Machines, batch_size: int) -> Iterator[Recipe]:
    """The same chain under the 1F1B schedule (Narayanan et al., SOSP 2019; synchronous), which
    keeps activations of as many micro-batches as there are stages below, and recomputes nothing."""
    yield from _equal_chain(units, machines, batch_size, "kfkb", recompute=False)


def _equal_chain(
    units: UnitGraph, machines: Machines, batch_size: int, builder: Builder, *, recompute: bool
) -> Iterator[Recipe]:
    parts = min(machines.devices, len(units))
    for size in micro_batch_sizes(batch_size):
        forward, backward = unit_seconds(units, machines.kind, size)
        work = [float(x) for x in forward + backward]
        order = leaves(decompose(units.predecessors, work))
        stages = [tuple(sorted(part)) for part in equal_parts(order, work, parts)]
        yield Recipe(tuple(RecipeStage(stage, 1, size, recompute) for stage in stages), builder)


def equal_parts(order: Sequence[int], work: Sequence[float], parts: int) -> list[tuple[int, ...]]:
    """Cuts ``order`` into ``parts`` pieces, none empty, of which the largest is smallest.

    Bisection on the largest piece; a greedy cut closes a piece when the next unit would be
    too much, or when only as many units as pieces are left.
    """
    assert 1 <= parts <= len(order)

    def pieces(limit: float) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        piece: list[int] = []
        load = 0.0
        for position, unit in enumerate(order):
            scarce = len(order) - position <= parts - len(found) - 1
            if piece and (scarce or load + work[unit] > limit):
                found.append(tuple(piece))
                piece, load = [], 0.0
            piece.append(unit)
            load += work[unit]
        return [*found, tuple(piece)]

    low, high = max(work[unit] for unit in order), sum(work[unit] for unit in order)
    low, high = low * (1 - 1e-9), high * (1 + 1e-9) + 1e-12
    for _ in range(60):
        middle = (low + high) / 2
        if len(pieces(middle)) <= parts:
            high = middle
        else:
            low = middle
    return pieces(high)
