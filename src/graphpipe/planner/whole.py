"""Which ops have to see the whole mini-batch at once.

An in-batch contrastive loss, a Dice loss or a router's balance loss mixes the samples of a
micro-batch: run on pieces it is another loss. It is exact if the ops that mix, and what
follows them, run once with the whole mini-batch (b_s = B, one replica, R = 1), while the
towers above run small micro-batches. Ops that follow the micro-batch by custom (batch
normalisation) are left alone.
"""

from __future__ import annotations

from graphpipe.graph.model_graph import ModelGraph


def whole_batch_ops(graph: ModelGraph) -> tuple[bool, ...]:
    """For each op whether it has to run with the whole mini-batch.

    These are the coupled ops above a loss term that is itself coupled (but not those that
    keep running statistics), and everything below them.
    """
    count = len(graph.ops)
    above = [False] * count
    index = graph.op_index
    for term in graph.loss_terms:
        if term.reduction == "coupled":
            above[index[term.op]] = True
    for i in range(count - 1, -1, -1):
        if above[i]:
            for source in graph.predecessors[i]:
                above[source] = True
    whole = [False] * count
    for i, op in enumerate(graph.ops):
        if op.prep:
            continue
        mixes = above[i] and op.coupled and not _normalises(op.target, bool(op.mutates))
        whole[i] = mixes or any(whole[source] for source in graph.predecessors[i])
    for term in graph.loss_terms:
        if term.reduction == "coupled":
            whole[index[term.op]] = True
    return tuple(whole)


def _normalises(target: str, mutates: bool) -> bool:
    return mutates or "batch_norm" in target
