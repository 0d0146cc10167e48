"""Draws the pictures of the concepts page: ``python docs/pictures/make.py [FOLDER]``.

Both plans have the same five stages, devices and times; they differ in their edges alone. A
test draws them again and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

from graphpipe.cost.cluster import Cluster, Device
from graphpipe.plan.builders import build_schedule
from graphpipe.plan.in_flight import with_bounds
from graphpipe.plan.plan import Plan
from graphpipe.plan.problem import problem_of
from graphpipe.plan.schedule import Schedule
from graphpipe.plan.stage import EdgeTensor, Stage, StageEdge, TaskTimes
from graphpipe.report.svg import stage_graph_svg, timeline_svg
from graphpipe.simulate.simulator import simulate

NAMES = ("image 1", "image 2", "text 1", "text 2", "head")
CHAIN = ((0, 1), (1, 2), (2, 3), (3, 4))
TOWERS = ((0, 1), (1, 4), (2, 3), (3, 4))
SAMPLES = 8
FORWARD_NS = 1_000_000


def plan_of(edges: tuple[tuple[int, int], ...]) -> Plan:
    """Five equal stages on five devices, micro-batches of one sample, no time for messages."""
    device = Device(kind="device", memory_bytes=2**30)
    draft = Plan(
        model="two towers",
        batch_size=SAMPLES,
        cluster=Cluster(name="five devices", devices=(device,) * len(NAMES)),
        stages=tuple(
            Stage(
                name=name,
                ops=(name,),
                micro_batch=1,
                devices=(rank,),
                in_flight=1,
                times={"device": TaskTimes(forward_ns=FORWARD_NS, backward_ns=2 * FORWARD_NS)},
            )
            for rank, name in enumerate(NAMES)
        ),
        edges=tuple(
            StageEdge(
                source=source,
                target=target,
                tensors=(EdgeTensor(name="hidden", shape=(1, 512), bytes_per_sample=2048.0),),
            )
            for source, target in edges
        ),
        schedule=Schedule(lines=("",) * len(NAMES)),
    )
    problem = with_bounds(problem_of(draft, 0)[0])
    built = build_schedule(problem, "kfkb")
    stages = tuple(
        stage.model_copy(update={"in_flight": spec.in_flight})
        for stage, spec in zip(draft.stages, problem.stages, strict=True)
    )
    schedule = Schedule.of(built.graph.tasks(built.lines), "kfkb")
    return draft.model_copy(update={"stages": stages, "schedule": schedule})


def pictures() -> dict[str, str]:
    """SVG text by file name."""
    drawn: dict[str, str] = {}
    for name, edges in (("chain", CHAIN), ("towers", TOWERS)):
        plan = plan_of(edges)
        drawn[f"{name}-graph.svg"] = stage_graph_svg(plan)
        drawn[f"{name}-timeline.svg"] = timeline_svg(plan, simulate(plan), width=760)
    return drawn


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, text in pictures().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
