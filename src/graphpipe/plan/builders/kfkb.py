"""kFkB: blocks of k forwards and k backwards under the in-flight bound. 1F1B is k = 1.

Each replica first runs the forwards that its in-flight bound allows, then k backwards and
k forwards in turn, then the backwards that are left. The blocks are true blocks: single
backwards and forwards in turn would starve a neighbour whose micro-batch is k times as
large.
"""

from __future__ import annotations

from graphpipe.plan.builders.built import Built, require_one_stage_per_rank
from graphpipe.plan.ordered import run_ordered
from graphpipe.plan.problem import PipelineProblem
from graphpipe.plan.task_graph import TaskGraph, lane_bound


def kfkb(problem: PipelineProblem) -> Built:
    """The kFkB schedule of a problem with at most one stage a device.

    Args:
        problem: ``block`` is k_s and ``in_flight`` is W_s of each stage. A stage without a
            backward runs its forwards in order.

    Raises:
        ScheduleError: if a device hosts two stages, or if an in-flight bound is so small that
            the lists deadlock; it names the tasks that wait for one another.
    """
    require_one_stage_per_rank(problem, "kFkB")
    graph = TaskGraph(problem, bounded=False)
    lines: list[list[int]] = [[] for _ in range(problem.world_size)]
    for number, spec in enumerate(problem.stages):
        here, back = graph.forward[number], graph.backward[number]
        bound = lane_bound(spec.in_flight, spec.replicas, spec.micro_batch)
        for replica, rank in enumerate(spec.devices):
            indices = range(replica, graph.micro_batches[number], spec.replicas)
            if back < 0:
                lines[rank] = [here + i for i in indices]
            else:
                lines[rank] = _blocks(
                    [here + i for i in indices], [back + i for i in indices], spec.block, bound
                )
    run = run_ordered(graph, lines)
    return Built(lines, run.end, run.makespan_ns, graph, "kfkb")


def _blocks(forward: list[int], backward: list[int], block: int, bound: int) -> list[int]:
    block = min(block, bound)
    line = forward[:bound]
    done = 0
    for at in range(bound, len(forward), block):
        line += backward[done : done + block]
        done += block
        line += forward[at : at + block]
    return line + backward[done:]
