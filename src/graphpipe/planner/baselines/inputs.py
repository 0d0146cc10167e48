"""From units with costs to what the baselines' optimisers read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graphpipe.cost.published.piper import (
    RECOMPUTE,
    VANILLA,
    PiperConfiguration,
    PiperFile,
    PiperNode,
)
from graphpipe.errors import CostError
from graphpipe.planner.baselines import pipedream, piper
from graphpipe.planner.baselines.downsets import (
    DOWN_SET_LIMIT,
    DownSetLimitError,
    FloatArray,
    enumerate_down_sets,
)
from graphpipe.planner.unit_graph import UnitGraph


def unit_edges(units: UnitGraph) -> tuple[tuple[int, int], ...]:
    """(source, target) pairs of units, ascending by target."""
    return tuple((v, u) for u, above in enumerate(units.predecessors) for v in above)


def unit_seconds(units: UnitGraph, kind: str, micro_batch: int) -> tuple[FloatArray, FloatArray]:
    """Forward and backward seconds of every unit for one micro-batch."""
    forward, backward = units.times(kind, micro_batch)
    return np.array(forward) / 1e9, np.array(backward) / 1e9


def pipedream_costs(units: UnitGraph, kind: str, micro_batch: int) -> pipedream.NodeCosts:
    """Costs for PipeDream. Activations are the units' outputs, as in the published profiles."""
    forward, backward = unit_seconds(units, kind, micro_batch)
    sent = np.zeros(len(units))
    for tensor in units.tensors:
        sent[tensor.producer] += tensor.forward_fixed + tensor.forward_bytes * micro_batch
    return pipedream.NodeCosts(forward + backward, np.array(units.gradient_bytes), sent)


def piper_input(
    units: UnitGraph,
    kind: str,
    micro_batch: int,
    *,
    micro_batches: int,
    memory_bytes: float,
    bandwidth: float,
) -> piper.PiperInput:
    """Costs for Piper: every unit plain or recomputing, without tensor parallelism.

    Memory is A x in-flight + B: plain, A is what the unit saves and B its static bytes and
    workspace; recomputing, A is its inputs and B also holds what it saves once.
    """
    count = len(units)
    forward, backward = unit_seconds(units, kind, micro_batch)
    parameters = np.array(units.gradient_bytes)
    memory_a, memory_b = np.zeros((count, 2)), np.zeros((count, 2))
    for u in range(count):
        facts = units.facts((u,))
        saved = facts.saved_fixed + facts.saved_bytes * micro_batch
        inputs = min(saved, facts.input_fixed + facts.input_bytes * micro_batch)
        static = facts.static + facts.workspace_fixed + facts.workspace_bytes * micro_batch
        memory_a[u] = saved, inputs
        memory_b[u] = static, static + saved - inputs
    plain = forward + backward
    again = plain + np.where(np.array(units.has_backward), forward, 0.0)
    edges = unit_edges(units)
    index = {edge: i for i, edge in enumerate(edges)}
    crossing = np.zeros(len(edges))
    for tensor in units.tensors:
        for reader in tensor.consumers:
            sent = tensor.forward_fixed + tensor.forward_bytes * micro_batch
            crossing[index[(tensor.producer, reader)]] += sent
    nothing = np.zeros(len(edges))
    configurations = piper.Configurations(
        seconds=np.stack([plain, again], axis=1),
        parameter_bytes=np.stack([parameters, parameters], axis=1),
        memory_a=memory_a,
        memory_b=memory_b,
        extra_in=nothing,
        extra_out=nothing,
    )
    return piper.PiperInput(
        nodes=count,
        edges=edges,
        edge_bytes=crossing,
        configurations={1: configurations},
        memory_bytes=memory_bytes,
        bandwidth=bandwidth,
        micro_batches=micro_batches,
    )


def piper_input_of_file(
    file: PiperFile,
    *,
    memory_bytes: float | None = None,
    bandwidth: float | None = None,
    micro_batches: int | None = None,
) -> piper.PiperInput:
    """Everything of a published input of Piper's, tensor parallelism included.

    Args:
        file: The file.
        memory_bytes: Of a device, instead of what the file says.
        bandwidth: Bytes per second, instead of what the file says.
        micro_batches: In a mini-batch, instead of what the file says.

    Raises:
        CostError: if neither the file nor the caller gives one of these, or if cutting an edge
            costs different bytes in a node's two configurations.
    """
    memory = memory_bytes or file.memory_bytes
    speed = bandwidth or file.bandwidth
    count = micro_batches or file.micro_batches
    if memory is None or speed is None or count is None:
        raise CostError(
            "Piper needs a memory limit, a bandwidth and a number of micro-batches",
            got=f"{memory}, {speed} and {count}",
            fix="Give what the file does not say",
        )
    place = {node.id: i for i, node in enumerate(file.nodes)}
    edges = tuple((place[a], place[b]) for a, b in file.edges)
    degrees = sorted({t for node in file.nodes for t, _ in node.configurations})
    configurations = {}
    for t in degrees:
        table = np.full((4, len(file.nodes), 2), np.nan)
        ways = [_both_ways(node, t) for node in file.nodes]
        for i, both in enumerate(ways):
            for c, item in enumerate(both):
                table[:, i, c] = (
                    item.seconds,
                    item.parameter_bytes,
                    item.memory_a,
                    item.memory_b,
                )
        into, out = np.zeros((2, len(edges))), np.zeros((2, len(edges)))
        for k, (a, b) in enumerate(file.edges):
            for c, item in enumerate(ways[place[b]]):
                into[c, k] = item.sync_forward.get(a, 0.0)
            for c, item in enumerate(ways[place[a]]):
                out[c, k] = item.sync_backward.get(b, 0.0)
        configurations[t] = piper.configurations_from_arrays(
            table[0], table[1], table[2], table[3], list(into), list(out)
        )
    return piper.PiperInput(
        nodes=len(file.nodes),
        edges=edges,
        edge_bytes=np.array(list(file.edges.values())),
        configurations=configurations,
        memory_bytes=float(memory),
        bandwidth=float(speed),
        micro_batches=count,
    )


def _both_ways(node: PiperNode, degree: int) -> tuple[PiperConfiguration, ...]:
    """The plain and the recomputing configuration; one that stands alone counts as both."""
    plain = node.configurations.get((degree, VANILLA))
    again = node.configurations.get((degree, RECOMPUTE))
    found = (plain or again, again or plain)
    return tuple(item for item in found if item is not None)


def fuse_chains(
    units: UnitGraph, weights: Sequence[float], *, limit: int = DOWN_SET_LIMIT
) -> UnitGraph:
    """Units fused along chains until the graph has at most ``limit`` down-sets.

    A unit and the only one that directly follows it, of which it is the only direct forerunner,
    are a link of a chain (direct: without skips over other units, such as residuals). The
    lightest links are fused first, a quarter of the units at a time. Where no link is left,
    units with the same forerunners and followers are fused too, the lightest first.

    Args:
        units: The units.
        weights: Of each unit, for instance its time.
        limit: Down-sets that the result may have.

    Returns:
        ``units`` itself if it has few enough.

    Raises:
        DownSetLimitError: if fusing does not get there.
    """
    members = [list(ops) for ops in units.members]
    loads = [float(weight) for weight in weights]
    if _few_enough(units, limit):
        return units
    fused = units
    while True:
        groups = _lightest_groups(fused, loads)
        if not groups:
            enumerate_down_sets(len(fused), unit_edges(fused), limit=limit)
            raise AssertionError("a graph with few enough down-sets was fused further")
        merged = _merged(members, loads, groups, fused)
        whole = _of_members(units, merged[0])
        if _few_enough(whole, limit):
            break
        (members, loads), fused = merged, whole
    # Of the last pairs only as many as it takes.
    low, high = 0, len(groups)
    while high - low > 1:
        middle = (low + high) // 2
        part = _of_members(units, _merged(members, loads, groups[:middle], fused)[0])
        if _few_enough(part, limit):
            high, whole = middle, part
        else:
            low = middle
    return whole


def _of_members(units: UnitGraph, members: Sequence[Sequence[int]]) -> UnitGraph:
    return UnitGraph(units.graph, units.costs, tuple(tuple(sorted(m)) for m in members))


def _few_enough(units: UnitGraph, limit: int) -> bool:
    try:
        enumerate_down_sets(len(units), unit_edges(units), limit=limit)
    except DownSetLimitError:
        return False
    return True


def _lightest_groups(units: UnitGraph, loads: Sequence[float]) -> list[tuple[int, int]]:
    """Disjoint pairs to fuse: the lightest quarter of the links, at least one."""
    before, after = _direct(units)
    links = [
        (loads[u] + loads[readers[0]], u, readers[0])
        for u, readers in enumerate(after)
        if len(readers) == 1 and before[readers[0]] == (u,)
    ]
    if not links:
        twins: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for u in range(len(units)):
            twins.setdefault((before[u], after[u]), []).append(u)
        for group in twins.values():
            group.sort(key=lambda u: (loads[u], u))
            pairs = zip(group[0::2], group[1::2], strict=False)
            links += [(loads[a] + loads[b], a, b) for a, b in pairs]
    used: set[int] = set()
    chosen: list[tuple[int, int]] = []
    for _, u, v in sorted(links):
        if len(chosen) >= max(1, len(units) // 4):
            break
        if u not in used and v not in used:
            used |= {u, v}
            chosen.append((u, v))
    return chosen


def _direct(
    units: UnitGraph,
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Predecessors and successors of each unit in the transitive reduction."""
    above: list[int] = []
    before: list[tuple[int, ...]] = []
    after: list[list[int]] = [[] for _ in range(len(units))]
    for u, sources in enumerate(units.predecessors):
        implied = 0
        for v in sources:
            implied |= above[v]
        direct = tuple(v for v in sources if not implied >> v & 1)
        before.append(direct)
        for v in direct:
            after[v].append(u)
        above.append(implied | sum(1 << v for v in sources))
    return before, [tuple(items) for items in after]


def _merged(
    members: Sequence[Sequence[int]],
    loads: Sequence[float],
    groups: Sequence[tuple[int, int]],
    units: UnitGraph,
) -> tuple[list[list[int]], list[float]]:
    """Members and loads after fusing, in a topological order."""
    target = {v: u for u, v in groups}
    merged: dict[int, list[int]] = {}
    weight: dict[int, float] = {}
    for unit, ops in enumerate(members):
        root = target.get(unit, unit)
        merged.setdefault(root, []).extend(ops)
        weight[root] = weight.get(root, 0.0) + loads[unit]
    waiting = {root: set[int]() for root in merged}
    for unit, above in enumerate(units.predecessors):
        root = target.get(unit, unit)
        waiting[root] |= {target.get(v, v) for v in above} - {root}
    done: set[int] = set()
    order: list[int] = []
    while len(order) < len(merged):
        ready = [root for root in merged if root not in done and waiting[root] <= done]
        order.extend(ready)
        done.update(ready)
    return [merged[root] for root in order], [weight[root] for root in order]
