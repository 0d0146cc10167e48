"""GPipe: every forward, then every backward. All samples of the copy are in flight."""

from __future__ import annotations

from graphpipe.plan.builders.built import Built, require_one_stage_per_rank
from graphpipe.plan.ordered import run_ordered
from graphpipe.plan.problem import PipelineProblem
from graphpipe.plan.task_graph import TaskGraph


def gpipe(problem: PipelineProblem) -> Built:
    """The GPipe schedule of a problem with at most one stage a device.

    The in-flight bounds of ``problem`` are replaced by all samples, which is what GPipe
    keeps; ``Built.problem`` has them.

    Raises:
        ScheduleError: if a device hosts two stages.
    """
    require_one_stage_per_rank(problem, "GPipe")
    whole = PipelineProblem(
        tuple(stage._replace(in_flight=max(1, problem.samples)) for stage in problem.stages),
        problem.edges,
        problem.samples,
        problem.world_size,
    )
    graph = TaskGraph(whole, bounded=False)
    lines: list[list[int]] = [[] for _ in range(problem.world_size)]
    for number, spec in enumerate(whole.stages):
        for start in (graph.forward[number], graph.backward[number]):
            if start < 0:
                continue
            for replica, rank in enumerate(spec.devices):
                tasks = range(start + replica, start + graph.micro_batches[number], spec.replicas)
                lines[rank] += tasks
    run = run_ordered(graph, lines)
    return Built(lines, run.end, run.makespan_ns, graph, "gpipe")
