"""Which messages an iteration needs: the one place that enumerates them.

A message carries the samples that a micro-batch of the producer and a micro-batch of the
consumer have in common; its gradient goes the same way back. This one rule covers every
mix of micro-batch sizes, replicas and short last micro-batches. Tensors without a batch
dimension travel with the message that holds the consumer micro-batch's first sample, so
each consumer micro-batch gets them once, and their gradient goes back there.

Where both ends are on one device there is no message, only a dependency. On an edge that
returns no gradient nothing would keep the producer from running ahead; there the consumer
returns *credits*, empty messages that some forwards of the producer wait for.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from graphpipe.plan.in_flight import run_ahead_bounds
from graphpipe.plan.problem import PipelineProblem

MessageKind = Literal["F", "B", "C"]


class Message(NamedTuple):
    """One message between two ranks.

    Attributes:
        kind: ``F`` tensors, ``B`` gradients, ``C`` credit (no tensors).
        edge: Position in ``Plan.edges``.
        source: Sending rank.
        target: Receiving rank.
        source_stage: Stage of the sending task. It is a forward for ``F`` and ``C`` and a
            backward for ``B``.
        source_micro_batch: Its number within the copy.
        target_stage: Stage of the receiving task, a backward for ``B``, else a forward.
        target_micro_batch: Its number within the copy.
        start: First sample carried, numbered within the mini-batch.
        stop: One past the last; equals ``start`` for a credit.
        fixed: Whether tensors without a batch dimension (for ``B`` their gradients) travel
            with it.
        nbytes: Predicted bytes.
    """

    kind: MessageKind
    edge: int
    source: int
    target: int
    source_stage: int
    source_micro_batch: int
    target_stage: int
    target_micro_batch: int
    start: int
    stop: int
    fixed: bool
    nbytes: int


class Overlap(NamedTuple):
    """Micro-batch ``source`` of one stage and ``target`` of another share these samples,
    numbered within the copy. ``first``: they include the first sample of ``target``."""

    source: int
    target: int
    start: int
    stop: int
    first: bool


def overlaps(samples: int, source_batch: int, target_batch: int) -> list[Overlap]:
    """All pairs of micro-batches that share samples, by target, then source.

    Args:
        samples: Samples of the copy.
        source_batch: Micro-batch size of the producing stage, samples.
        target_batch: Micro-batch size of the consuming stage, samples.
    """
    out: list[Overlap] = []
    start = 0
    while start < samples:
        i, j = start // source_batch, start // target_batch
        stop = min((i + 1) * source_batch, (j + 1) * target_batch, samples)
        out.append(Overlap(i, j, start, stop, start == j * target_batch))
        start = stop
    return out


class Credit(NamedTuple):
    """Forward ``producer`` of the edge's source may start only after forward ``consumer`` of
    its target."""

    edge: int
    consumer: int
    producer: int


def returns_gradient(problem: PipelineProblem, edge: int) -> bool:
    """Whether gradients go back over the edge: its tensors have one and both ends a backward."""
    item = problem.edges[edge]
    stages = problem.stages
    return (
        item.has_gradient and stages[item.source].has_backward and stages[item.target].has_backward
    )


def credits(problem: PipelineProblem) -> list[Credit]:
    """The run-ahead dependencies of all edges that return no gradient.

    Forward i of the source waits for the forwards of the target that end at least the
    run-ahead bound (:func:`graphpipe.plan.in_flight.run_ahead_bounds`) before i's last
    sample and did not do so for forward i - 1.
    """
    out: list[Credit] = []
    held = [e for e in range(len(problem.edges)) if not returns_gradient(problem, e)]
    if not held:
        return out
    ahead = run_ahead_bounds(problem)
    for e in held:
        edge = problem.edges[e]
        b_source = problem.stages[edge.source].micro_batch
        b_target = problem.stages[edge.target].micro_batch
        done = 0
        for i in range(-(-problem.samples // b_source)):
            stop = min((i + 1) * b_source, problem.samples)
            while (done + 1) * b_target <= stop - ahead[edge.source]:
                out.append(Credit(e, done, i))
                done += 1
    return out


def messages(problem: PipelineProblem, first_sample: int = 0) -> list[Message]:
    """All messages of one copy whose samples begin at ``first_sample`` of the mini-batch.

    In a fixed order: forwards by edge, backwards by edge, credits; within an edge by target
    micro-batch, then source micro-batch (of the forward direction).
    """
    forward: list[Message] = []
    backward: list[Message] = []
    stages = problem.stages
    for e, edge in enumerate(problem.edges):
        source, target = stages[edge.source], stages[edge.target]
        back = returns_gradient(problem, e)
        for i, j, start, stop, first in overlaps(
            problem.samples, source.micro_batch, target.micro_batch
        ):
            here = source.devices[i % source.replicas]
            there = target.devices[j % target.replicas]
            if here == there:
                continue
            count, low, high = stop - start, first_sample + start, first_sample + stop
            if edge.batched or first:
                nbytes = edge.forward_bytes * count + (edge.forward_fixed if first else 0.0)
                forward.append(
                    Message(
                        "F", e, here, there, edge.source, i, edge.target, j,
                        low, high, first, round(nbytes),
                    )
                )  # fmt: skip
            if back and (edge.gradient_batched or first):
                nbytes = edge.backward_bytes * count + (edge.backward_fixed if first else 0.0)
                backward.append(
                    Message(
                        "B", e, there, here, edge.target, j, edge.source, i,
                        low, high, first, round(nbytes),
                    )
                )  # fmt: skip
    empty: list[Message] = []
    for e, j, i in credits(problem):
        edge = problem.edges[e]
        source, target = stages[edge.source], stages[edge.target]
        here = source.devices[i % source.replicas]
        there = target.devices[j % target.replicas]
        if here != there:
            at = first_sample + min((j + 1) * target.micro_batch, problem.samples)
            empty.append(
                Message("C", e, there, here, edge.target, j, edge.source, i, at, at, False, 0)
            )
    return forward + backward + empty
