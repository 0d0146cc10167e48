"""Errors that say what to do, and plans that can be seen and steered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from graphpipe.cost.analytic import estimate
from graphpipe.cost.cluster import Cluster
from graphpipe.errors import GraphPipeError
from graphpipe.graph.capture import capture
from graphpipe.plan.plan import Plan
from graphpipe.plan.validate import validate
from graphpipe.planner.constraints import Constraints
from graphpipe.planner.search import plan as search
from graphpipe.report.page import write_report
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.simulate.simulator import simulate
from tests.cases.models import BATCH, Case, captured, load, plan_of
from tests.cases.test_behaviour import pipeline, some_cut
from tests.runtime.manual import Part, manual_plan


def stepped(case: Case, args: Any, targets: Any, kwargs: Any = None) -> None:
    pipe = pipeline(case, 2, 4)
    try:
        pipe.step(args, kwargs or {}, targets=targets)
    finally:
        assert pipe.iterations == 0, "something ran"
        pipe.close()


def wrong_shape() -> None:
    case = load("a17_token_mean_loss")
    stepped(case, case.args[0][:, :5], case.targets)


def wrong_dtype() -> None:
    case = load("a01_skip_long")
    stepped(case, case.args[0].double(), case.targets)


def missing_keyword() -> None:
    case = load("a10_late_kwargs")
    given = {name: value for name, value in case.kwargs.items() if name != "cond_id"}
    stepped(case, case.args, case.targets, given)


def missing_labels() -> None:
    case = load("a01_skip_long")
    stepped(case, case.args, None)


def another_model() -> None:
    graph = captured("a01_skip_long")
    other = load("a20_shape_ints_consts")
    plan = plan_of(graph, some_cut("a01_skip_long", 2), [4, 4])
    Pipeline(other.model, plan, other.loss_fn, graph=captured(other.name), transport="in_process")


def meta_parameters() -> None:
    case = load("a01_skip_long")
    with torch.device("meta"):
        model = type(case.model)()
    graph = capture(model, case.args, targets=case.targets, loss_fn=case.loss_fn)
    plan = plan_of(graph, some_cut(case.name, 2), [4, 4])
    Pipeline(model, plan, case.loss_fn, graph=graph, transport="in_process")


def sizes_that_do_not_divide() -> None:
    graph = captured("a01_skip_long")
    validate(plan_of(graph, some_cut("a01_skip_long", 2), [4, 3]), graph)


def unknown_module() -> None:
    graph = captured("a01_skip_long")
    cluster = Cluster.uniform("cpu-core", nodes=1, per_node=2)
    demand = Constraints(together=[["blocks.0", "blocks.9"]])
    search(graph, estimate(graph, cluster), cluster, batch_size=BATCH, constraints=demand)


def unknown_stage() -> None:
    graph = captured("a01_skip_long")
    plan = plan_of(graph, some_cut("a01_skip_long", 2), [4, 4])
    text = plan.model_dump_json().replace(f'"{plan.stages[0].ops[0]}"', '"no_such_op"', 1)
    validate(Plan.model_validate_json(text), graph)


def no_back_end() -> None:
    case = load("a01_skip_long")
    graph = captured(case.name)
    plan = plan_of(graph, some_cut(case.name, 2), [4, 4])
    Pipeline(case.model, plan, case.loss_fn, graph=graph)  # nobody started processes


MISTAKES = {
    wrong_shape: r"args\[0\].*\b8\b.*\b5\b",
    wrong_dtype: r"args\[0\].*float32.*float64",
    missing_keyword: r"cond_id",
    missing_labels: r"targets",
    another_model: r"not the one that was planned",
    meta_parameters: r"meta",
    sizes_that_do_not_divide: r"divide one another.*4 and 3",
    unknown_module: r"blocks\.9",
    unknown_stage: r"no_such_op",
    no_back_end: r"torchrun",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_told_before_anything_runs(mistake: Any) -> None:
    with pytest.raises(GraphPipeError, match=MISTAKES[mistake]) as caught:
        mistake()
    assert caught.value.where or caught.value.got or caught.value.fix
    assert "\n" not in str(caught.value).strip()


@pytest.mark.long
def test_a_plan_can_be_seen_steered_written_and_loaded(tmp_path: Path) -> None:
    case = load("a23_mm_transformer")
    graph = captured(case.name)
    cluster = Cluster.uniform("cpu-core", nodes=1, per_node=4)
    costs = estimate(graph, cluster)
    tops = [name for name, _ in case.model.named_children()]
    paths = {op.module.split(".")[0] for op in graph.ops}
    pair = [name for name in tops if name in paths][:2]
    demand = Constraints(together=[pair])
    plan = search(graph, costs, cluster, batch_size=BATCH, constraints=demand)
    inside = {op.name for op in graph.ops if op.module.split(".")[0] in pair}
    cuttable = {name for stage in plan.stages for name in stage.ops}
    holders = {s.name for s in plan.stages if set(s.ops) & inside & cuttable}
    assert len(holders) == 1
    # What is shown names the stages, and tasks of a device follow one another.
    timeline = simulate(plan)
    text = str(plan)
    assert "depth" in text
    ends: dict[int, int] = {}
    for event in sorted(timeline.events, key=lambda event: (event.start_ns, event.end_ns)):
        assert event.start_ns >= ends.get(event.rank, 0)
        ends[event.rank] = event.end_ns
    assert max(ends.values()) <= timeline.iteration_ns
    listed = [module for stage in plan.stages for module in stage.modules]
    whole = [module for module in listed if "(part)" not in module]
    assert len(whole) == len(set(whole))
    write_report(plan, timeline, path=tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 10_000
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_manual_plan_obeys_the_same_rules_as_a_searched_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    graph = capture(model, torch.randn(4, 4), loss_fn=torch.mean)
    plan = manual_plan(graph, [Part("0 1", 2), Part("2", 4)], batch_size=8)
    validate(plan, graph)
    stages = (plan.stages[0], plan.stages[1].model_copy(update={"ops": plan.stages[1].ops[:-1]}))
    fields = {name: getattr(plan, name) for name in Plan.model_fields}
    with pytest.raises(GraphPipeError, match=graph.loss_terms[0].op):
        validate(Plan(**{**fields, "stages": stages}), graph)
