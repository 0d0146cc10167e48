"""Random problems of every kind, for tests of builders, checks, simulator and actions."""

from __future__ import annotations

import random

from graphpipe.plan.in_flight import with_bounds
from graphpipe.plan.problem import EdgeSpec, PipelineProblem, StageSpec


def random_problem(
    seed: int,
    *,
    shared: bool = True,
    most_stages: int = 7,
    frozen: bool = True,
    sizes: tuple[int, ...] = (1, 2, 3, 4, 6, 8),
    zero_times: bool = False,
) -> PipelineProblem:
    """A random DAG of stages with bounds by the formula.

    Args:
        seed: Same seed, same problem.
        shared: Whether a device may host several stages.
        most_stages: At most so many stages.
        frozen: Whether stages without a backward and edges without gradient occur.
        sizes: Micro-batch sizes to choose from.
        zero_times: Whether every task takes no time.
    """
    rng = random.Random(seed)
    count = rng.randint(1, most_stages)
    pairs = {(rng.randrange(t), t) for t in range(1, count) if rng.random() < 0.9}
    for _ in range(rng.randint(0, count) if count > 1 else 0):
        source, target = sorted(rng.sample(range(count), 2))
        pairs.add((source, target))
    world = rng.randint(1, count) + 2 if shared else 0
    stages: list[StageSpec] = []
    for _ in range(count):
        replicas = rng.choice([1, 1, 1, 2, 3])
        if shared:
            devices = tuple(rng.sample(range(world), replicas))
        else:
            devices = tuple(range(world, world + replicas))
            world += replicas
        trains = not (frozen and rng.random() < 0.2)
        times = (0, 0) if zero_times else (rng.randint(1, 50), rng.randint(1, 99))
        stages.append(
            StageSpec(
                rng.choice(sizes), replicas, 1, 1, devices, times[0], times[1] * trains, trains
            )
        )
    edges = []
    for source, target in sorted(pairs):
        fixed = rng.random() < 0.2
        gradient = not (frozen and rng.random() < 0.15)
        batched = not (fixed and rng.random() < 0.5)
        edges.append(
            EdgeSpec(
                source,
                target,
                rng.randint(0, 40) * batched,
                rng.randint(1, 9) * fixed,
                rng.randint(0, 40) * batched * gradient,
                rng.randint(1, 9) * fixed * gradient,
                gradient,
                batched,
                batched and rng.random() < 0.9,
            )
        )
    samples = rng.choice([1, 2, 3, 5, 8, 12, 17, 24, 31])
    return with_bounds(PipelineProblem(tuple(stages), tuple(edges), samples, world))
