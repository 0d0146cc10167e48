"""How many samples each stage must keep in flight so that no device waits.

With one stage a device, no replicas, balanced stages, sizes in powers of two and free
communication a pipeline under the bound never stalls (250 of 250 random DAGs), and one
quantum less in a source stalls it (in all but some 3 % of the DAGs, where a side branch has
some to spare). With two replicas about 1 % stall, by up to a sixth. With three replicas, sizes
that do not divide, or several stages a device it is a starting point: simulate, and add
slack.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from graphpipe.errors import PlanError
from graphpipe.plan.problem import PipelineProblem


class InFlight(NamedTuple):
    """``block[s]`` is k_s of kFkB, ``in_flight[s]`` is W_s in samples of one copy."""

    block: tuple[int, ...]
    in_flight: tuple[int, ...]


def in_flight_bounds(
    micro_batch: Sequence[int],
    replicas: Sequence[int],
    edges: Iterable[tuple[int, int]],
    samples: int,
    *,
    has_backward: Sequence[bool] | None = None,
    without_gradient: Collection[tuple[int, int]] = (),
    slack: int | Sequence[int] = 0,
    names: Sequence[str] | None = None,
) -> InFlight:
    """k_s and W_s of every stage of a stage DAG.

    The quantum of a stage is q_s = r_s b_s k_s with k_s = max(1, ceil(largest consumer
    quantum / (r_s b_s))). A sink has W_s = q_s; another stage has the largest, over its
    consumers c, of W_c + q_s + max(0, b_s k_s - q_c), rounded up to q_s. No stage has more
    than all its samples.

    A stage with a backward waits only for the consumers that return a gradient. A stage
    without one is held back by a run-ahead bound instead, samples forwarded and not yet
    consumed by every consumer; the same formula over all its consumers gives it.

    Args:
        micro_batch: b_s by stage, samples.
        replicas: r_s by stage.
        edges: (source, target) pairs of stage numbers, in any order.
        samples: Samples of one copy.
        has_backward: By stage; by default every stage has one.
        without_gradient: Edges that carry no gradient although both ends have a backward.
        slack: Quanta to add, to every stage or by stage. A stage's slack counts for the
            stages before it too.
        names: Names of the stages for messages, by default their numbers.

    Raises:
        PlanError: if the edges form a cycle; it names the stages.
    """
    count = len(micro_batch)
    backward = has_backward if has_backward is not None else [True] * count
    extra = [slack] * count if isinstance(slack, int) else list(slack)
    consumers: list[list[int]] = [[] for _ in range(count)]
    for source, target in edges:
        consumers[source].append(target)
    block = [1] * count
    bound = [0] * count
    for stage in reverse_topological_order(consumers, names):
        unit = replicas[stage] * micro_batch[stage]
        quanta = [
            replicas[c] * micro_batch[c] * block[c] for c in consumers[stage] if backward[stage]
        ]
        block[stage] = max(1, -(-max(quanta, default=1) // unit))
        quantum = unit * block[stage]
        need = quantum
        for c in consumers[stage]:
            if backward[stage] and (not backward[c] or (stage, c) in without_gradient):
                continue
            consumer_quantum = replicas[c] * micro_batch[c] * block[c]
            over = max(0, micro_batch[stage] * block[stage] - consumer_quantum)
            need = max(need, bound[c] + quantum + over)
        need += extra[stage] * quantum
        bound[stage] = min(samples, -(-need // quantum) * quantum)
    return InFlight(tuple(block), tuple(bound))


def run_ahead_bounds(problem: PipelineProblem) -> tuple[int, ...]:
    """Samples by which each stage may be ahead of a consumer that returns no gradient.

    For a stage without a backward it is its ``in_flight``. For another stage it is the
    bound that the formula of :func:`in_flight_bounds` gives when such edges count too, at
    least its ``in_flight``: a side output must never hold up the stage's own pipeline.
    """
    stages = problem.stages
    consumers: list[list[int]] = [[] for _ in stages]
    for edge in problem.edges:
        consumers[edge.source].append(edge.target)
    ahead = [0] * len(stages)
    for s in reverse_topological_order(consumers):
        stage = stages[s]
        ahead[s] = stage.in_flight
        if not stage.has_backward:
            continue
        quantum = stage.replicas * stage.micro_batch * stage.block
        for c in consumers[s]:
            target = stages[c]
            over = max(
                0,
                stage.micro_batch * stage.block
                - target.replicas * target.micro_batch * target.block,
            )
            ahead[s] = max(ahead[s], ahead[c] + quantum + over)
    return tuple(min(problem.samples, item) for item in ahead)


def with_bounds(problem: PipelineProblem, slack: int | Sequence[int] = 0) -> PipelineProblem:
    """``problem`` with ``block`` and ``in_flight`` of every stage set by the formula."""
    stages = problem.stages
    bounds = in_flight_bounds(
        [stage.micro_batch for stage in stages],
        [stage.replicas for stage in stages],
        [(edge.source, edge.target) for edge in problem.edges],
        problem.samples,
        has_backward=[stage.has_backward for stage in stages],
        without_gradient={(e.source, e.target) for e in problem.edges if not e.has_gradient},
        slack=slack,
    )
    return PipelineProblem(
        tuple(
            stage._replace(block=block, in_flight=in_flight)
            for stage, block, in_flight in zip(stages, *bounds, strict=True)
        ),
        problem.edges,
        problem.samples,
        problem.world_size,
    )


def reverse_topological_order(
    consumers: Sequence[Sequence[int]], names: Sequence[str] | None = None
) -> list[int]:
    """Stage numbers, every stage after all its consumers.

    Args:
        consumers: By stage, the stages that read from it.
        names: Names of the stages for messages, by default their numbers.

    Raises:
        PlanError: if there is a cycle; it names the stages on one.
    """
    count = len(consumers)
    producers: list[list[int]] = [[] for _ in range(count)]
    missing = [len(items) for items in consumers]
    for stage, items in enumerate(consumers):
        for c in items:
            producers[c].append(stage)
    order = [stage for stage in range(count) if not missing[stage]]
    for stage in order:  # grows while it is walked
        for p in producers[stage]:
            missing[p] -= 1
            if not missing[p]:
                order.append(p)
    if len(order) < count:
        cycle = find_cycle(consumers, [s for s in range(count) if missing[s]])
        raise PlanError(
            "The stages form a cycle",
            where="stages "
            + " -> ".join(names[s] if names else str(s) for s in [*cycle, cycle[0]]),
            expected="a stage graph without cycles",
            fix="Merge the stages on the cycle, or cut the model elsewhere",
        )
    return order


def find_cycle(successors: Sequence[Sequence[int]], among: Iterable[int]) -> list[int]:
    """The nodes of one cycle, in order; ``among`` holds nodes of which each has a successor
    among them that lies on or leads to a cycle."""
    allowed = set(among)
    path: list[int] = []
    place: dict[int, int] = {}
    node = min(allowed)
    while node not in place:
        place[node] = len(path)
        path.append(node)
        node = min(item for item in successors[node] if item in allowed)
    return path[place[node] :]
