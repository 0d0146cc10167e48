"""Which ops must stay together, and which are prepared anew by every stage that needs them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping

from torch import fx

from graphpipe.graph.autocast import operator_of
from graphpipe.graph.dataflow import DataFlow
from graphpipe.graph.fake_run import FakeRun, TensorShape
from graphpipe.graph.flow import Kind
from graphpipe.graph.normalise import origin_of

PREP_FLOPS = 1_000_000
"""Most FLOPs of a prep op at the observed size: a rotary table passes, a layer does not."""

PREP_BUFFER_BYTES = 16 * 2**20
"""Largest buffer that every reader of a prep op may be asked to hold."""


class _Union:
    """Disjoint sets of nodes."""

    def __init__(self) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}

    def find(self, node: fx.Node) -> fx.Node:
        while (parent := self._parent.get(node, node)) is not node:
            self._parent[node] = self._parent.get(parent, parent)
            node = parent
        return node

    def join(self, nodes: Iterable[fx.Node]) -> None:
        first: fx.Node | None = None
        for node in nodes:
            if first is None:
                first = self.find(node)
            else:
                self._parent[self.find(node)] = first


def groups(
    ops: list[fx.Node], run: FakeRun, pairs: Iterable[tuple[fx.Node, fx.Node]] = ()
) -> dict[fx.Node, int]:
    """Number of the atomic group of every op that has one.

    Together are: a tuple and its items; everything that shares storage with something that
    is written to, what writes to it, and what reads it before the last write; all readers of a
    buffer that a forward changes; a counter of a module (``num_batches_tracked``) and the
    module's next op; and the given pairs.

    Args:
        ops: The ops in graph order.
        run: A fake run, which knows storages and writes.
        pairs: Further ops to keep together (a loss and its count).
    """
    union = _Union()
    order = {node: i for i, node in enumerate(ops)}
    for node in ops:
        if node.target is operator.getitem:
            union.join([node.args[0], node])  # type: ignore[list-item]
    for pair in pairs:
        union.join(node for node in pair if node in order)
    writers: dict[int, list[fx.Node]] = {}
    for node in ops:
        for storage in run.nodes[node].mutates:
            writers.setdefault(storage, []).append(node)
    sharing: dict[int, list[fx.Node]] = {}
    for node, seen in run.nodes.items():
        for value in seen.values:
            sharing.setdefault(value.storage, []).append(node)
    for storage, writing in writers.items():
        last = max(order[node] for node in writing)
        members = dict.fromkeys(writing)
        is_state = any(node.op == "get_attr" for node in sharing.get(storage, ()))
        for node in sharing.get(storage, ()):
            if node in order:
                members[node] = None
            for reader in node.users:
                if reader in order and (is_state or order[reader] < last):
                    members[reader] = None
        union.join(members)
    for i, node in enumerate(ops):
        if run.nodes[node].mutates and not any(source in order for source in node.all_input_nodes):
            following = (other for other in ops[i + 1 :] if origin_of(other) and _same(node, other))
            partner = next(following, None)
            if partner is not None:
                union.join([partner, node])
    sizes: dict[fx.Node, list[fx.Node]] = {}
    for node in ops:
        sizes.setdefault(union.find(node), []).append(node)
    numbered: dict[fx.Node, int] = {}
    for number, members_of in enumerate(m for m in sizes.values() if len(m) > 1):
        numbered.update(dict.fromkeys(members_of, number))
    return numbered


def _same(a: fx.Node, b: fx.Node) -> bool:
    return (origin_of(a).module, origin_of(a).call) == (origin_of(b).module, origin_of(b).call)


def prep_ops(
    ops: list[fx.Node],
    run: FakeRun,
    flow: DataFlow,
    state: Mapping[str, TensorShape],
    parameters: Collection[str],
    grouped: Mapping[fx.Node, int],
    sinks: Collection[fx.Node],
    is_random: Callable[[fx.Node], bool],
) -> set[fx.Node]:
    """Ops that are cheap functions of the graph's inputs alone, and per sample.

    Args:
        ops: The ops in graph order.
        run: A fake run with the work of every op.
        flow: The data flow.
        state: Parameters, buffers and constants by name.
        parameters: Names of parameters and of buffers that a forward changes: not for a prep op.
        grouped: Atomic groups; of a group all ops are prep or none.
        sinks: Loss terms, counts and outputs: these are never prep.
        is_random: Whether an op draws random numbers.
    """
    members: dict[int, list[fx.Node]] = {}
    for node, number in grouped.items():
        members.setdefault(number, []).append(node)
    prep: set[fx.Node] = set()
    refused: set[int] = set()

    def held(node: fx.Node) -> bool:
        if node.op == "placeholder" or node in prep:
            return True
        if node.op == "get_attr":
            name = str(node.target)
            shape = state.get(name)
            if shape is None or name in parameters:
                return False
            return _nbytes(shape) <= PREP_BUFFER_BYTES
        return node not in order

    def fits(node: fx.Node) -> bool:
        seen = run.nodes[node]
        if node in sinks or seen.mutates or is_random(node) or node in flow.coupled:
            return False
        if any(value.requires_grad for value in seen.values):
            return False
        if seen.forward.flops > PREP_FLOPS or node.op == "call_module":
            return False
        if not _is_library(node):
            return False
        kind = flow.flows[node].kind if node in flow.flows else Kind.FREE
        fresh = not any(source in flow.flows for source in node.all_input_nodes)
        if kind in (Kind.SUM, Kind.MIXED) and not fresh:
            return False
        return all(held(source) for source in node.all_input_nodes)

    order = {node: i for i, node in enumerate(ops)}
    for node in ops:
        group = grouped.get(node)
        if group is not None and group in refused:
            continue
        if fits(node):
            prep.add(node)
        elif group is not None:
            refused.add(group)
    # A group that is refused takes its members back, and with them what reads them.
    changed = True
    while changed:
        changed = False
        for node in ops:
            if node not in prep:
                continue
            group = grouped.get(node)
            whole = group is None or all(other in prep for other in members[group])
            if not whole or not all(held(source) for source in node.all_input_nodes):
                prep.discard(node)
                changed = True
    return prep


def _is_library(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    target, _, _ = operator_of(node)
    return getattr(target, "namespace", "") == "aten"


def _nbytes(shape: TensorShape) -> int:
    count = shape.dtype.itemsize
    for size in shape.shape:
        count *= size
    return count
