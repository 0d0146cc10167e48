"""What a set of operators reads and writes: the one source of truth for stage boundaries.

``plan`` derives the edges of the stage graph from it, ``runtime`` the stage modules and
the messages, ``cost`` the bytes of an edge.

Which ops a partition divides: :func:`partition_ops`, that is every op that is not a prep
op. A prep op belongs to no stage's op list; every stage that reads it, directly or through
other prep ops, computes it again. By construction a prep op reads only graph inputs and
other prep ops, so it never adds an edge. A value that is a loss term or an output of the
model is never prep. Integers are not ops at all: in the program they are arithmetic on
``micro_batch_size``, and each stage computes those that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from graphpipe.errors import GraphError
from graphpipe.graph.model_graph import ModelGraph


@dataclass(frozen=True)
class StageCut:
    """The boundary of a set of ops. Every tuple is in graph order and without repeats.

    Attributes:
        ops: The set itself.
        prep: Prep ops that the stage computes for itself, transitively.
        inputs: Graph inputs that the ops or their prep ops read.
        reads: Ops of other stages whose values arrive from there.
        writes: Ops of the set whose values ops of other stages read.
        sinks: Ops of the set that are loss terms, counts of loss terms or model outputs.
        parameters: Canonical names of the parameters and buffers that must be there.
    """

    ops: tuple[str, ...]
    prep: tuple[str, ...]
    inputs: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    sinks: tuple[str, ...]
    parameters: tuple[str, ...]


def partition_ops(graph: ModelGraph) -> tuple[str, ...]:
    """The ops that a partition must divide among its stages, in graph order."""
    return tuple(op.name for op in graph.ops if not op.prep)


def stage_cut(graph: ModelGraph, ops: Iterable[str]) -> StageCut:
    """What the stage made of ``ops`` reads from outside and gives to others.

    Prep ops in ``ops`` are ignored: they are recomputed wherever they are read.

    Raises:
        GraphError: if a name is not an op of the graph.
    """
    by_name = graph.op_by_name
    members = set(ops)
    for name in members:
        if name not in by_name:
            raise GraphError("A stage names an op that the graph does not have", where=repr(name))
    members = {name for name in members if not by_name[name].prep}
    prep: set[str] = set()
    inputs: set[str] = set()
    reads: set[str] = set()
    parameters: set[str] = set()
    stack = list(members)
    while stack:
        op = by_name[stack.pop()]
        parameters.update(op.parameters, op.mutates)
        for source in op.inputs:
            producer = by_name.get(source)
            if producer is None:
                inputs.add(source)
            elif producer.prep:
                if source not in prep:
                    prep.add(source)
                    stack.append(source)
            elif source not in members:
                reads.add(source)
    index = graph.op_index
    writes = {
        name
        for name in members
        if any(
            graph.ops[reader].name not in members and not graph.ops[reader].prep
            for reader in graph.successors[index[name]]
        )
    }
    order = index.__getitem__
    return StageCut(
        ops=tuple(sorted(members, key=order)),
        prep=tuple(sorted(prep, key=order)),
        inputs=tuple(item.name for item in graph.inputs if item.name in inputs),
        reads=tuple(sorted(reads, key=order)),
        writes=tuple(sorted(writes, key=order)),
        sinks=tuple(sorted(sink_ops(graph) & members, key=order)),
        parameters=tuple(item.name for item in graph.parameters if item.name in parameters),
    )


def sink_ops(graph: ModelGraph) -> set[str]:
    """Ops whose values the caller gets: loss terms, their counts, the model's outputs."""
    names = {name for name in graph.outputs if name in graph.op_by_name}
    for term in graph.loss_terms:
        names.add(term.op)
        if term.count_op is not None:
            names.add(term.count_op)
    return names
