"""A plan with split joins trains as the unsplit model does in a single process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from graphpipe.errors import RuntimeSetupError
from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.graph.split_joins import split_joins
from graphpipe.plan.plan import Plan
from graphpipe.runtime.launch import launch
from graphpipe.runtime.optimize import OptimizerFactory
from graphpipe.runtime.pipeline import Pipeline
from graphpipe.zoo.load import load_job
from tests.graph.joined import Joined
from tests.runtime.equality import adamw, halves, sgd, single_process
from tests.runtime.manual import Part, manual_plan
from tests.runtime.models import Example, mean_square

BATCH = 12


def made(model: nn.Module, dtype: torch.dtype) -> Example:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(BATCH, 6, generator=generator, dtype=dtype)
    target = torch.randn(BATCH, 2, generator=generator, dtype=dtype)
    return Example(model.to(dtype), (x,), target, mean_square)


def graph_of(example: Example) -> ModelGraph:
    return capture(
        example.model, example.args, example.kwargs, targets=example.targets,
        loss_fn=example.loss_fn,
    )  # fmt: skip


def branch_of(graph: ModelGraph, number: int) -> str:
    """Names of the ops that make the i-th partial product, and what it is made of."""
    return " ".join(op.name for op in graph.ops if op.key.endswith(f"[{number}]"))


def parts(graph: ModelGraph, shapes: list[tuple[int, int]]) -> list[Part]:
    """A stage for each branch with its part of the join, (micro-batch, replicas); the rest."""
    total = next(op.name for op in graph.ops if op.target == "graphpipe.join_sum")
    stages = [
        Part(f"branches.{i} {branch_of(graph, i)}", size, replicas=replicas)
        for i, (size, replicas) in enumerate(shapes[:-1])
    ]
    size, replicas = shapes[-1]
    return [*stages, Part(f"{total} head loss_fn", size, replicas=replicas)]


def run(
    example: Example,
    graph: ModelGraph | None,
    plan: Plan,
    optimizer: OptimizerFactory,
    steps: int = 4,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor], list[float | None]]:
    pipe = Pipeline(example.model, plan, example.loss_fn, optimizer, graph=graph, **options)
    losses, norms = [], []
    for step in range(steps):
        batch = halves(example, step)
        losses.append(float(pipe.step(batch.args, batch.kwargs, targets=batch.targets)))
        norms.append(pipe.last_gradient_norm)
    state = pipe.state_dict()
    pipe.close()
    return losses, state, norms


def assert_trains_alike(
    example: Example,
    plan: Plan,
    optimizer: OptimizerFactory,
    tolerance: float,
    graph: ModelGraph | None = None,
    **options: Any,
) -> None:
    history, want = single_process(example, optimizer, 4)
    losses, state, _ = run(example, graph, plan, optimizer, transport="in_process", **options)
    for (loss, _), got in zip(history, losses, strict=True):
        assert got == pytest.approx(loss, rel=tolerance, abs=tolerance)
    assert state.keys() == want.keys()
    for name, value in state.items():
        assert value.shape == want[name].shape
        torch.testing.assert_close(value, want[name], rtol=tolerance, atol=tolerance, msg=name)


SHAPES = {
    "one device a branch": [(2, 1), (2, 1), (2, 1), (2, 1)],
    "sizes and replicas": [(6, 1), (1, 2), (3, 2), (6, 1)],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "optimizer", "tolerance"),
    [(torch.float64, adamw, 1e-10), (torch.float32, sgd, 1e-6)],
)
def test_equal_to_a_single_process(
    shape: str, dtype: torch.dtype, optimizer: OptimizerFactory, tolerance: float
) -> None:
    example = made(Joined(lambda x, _: x.tanh()), dtype)
    split = split_joins(graph_of(example))
    plan = manual_plan(split, parts(split, SHAPES[shape]), batch_size=BATCH)
    assert plan.split_joins == split.joins
    assert_trains_alike(example, plan, optimizer, tolerance, split)


def test_copies_and_several_slices_on_a_device() -> None:
    example = made(Joined(), torch.float64)
    split = split_joins(graph_of(example))
    stages = parts(split, [(2, 1), (2, 1), (2, 1), (2, 1)])
    for part, devices in zip(stages, ((0,), (0,), (1,), (1,)), strict=True):
        part.devices = devices
    plan = manual_plan(split, stages, batch_size=BATCH, copies=2)
    assert_trains_alike(example, plan, adamw, 1e-10, split)


def test_over_processes() -> None:
    example = made(Joined(lambda x, _: x.tanh()), torch.float64)
    split = split_joins(graph_of(example))
    plan = manual_plan(split, parts(split, SHAPES["sizes and replicas"]), batch_size=BATCH)
    history, want = single_process(example, adamw, 3)
    results = launch(
        lambda: run(example, None, plan, adamw, steps=3),
        plan.world_size, timeout=120, threads=1, method="fork",
    )  # fmt: skip
    for losses, state, _ in results:
        assert losses == pytest.approx([loss for loss, _ in history], rel=1e-10)
        for name, value in state.items():
            torch.testing.assert_close(value, want[name], rtol=1e-10, atol=1e-10, msg=name)


def plain(shape: str = "one device a branch", **changes: Any) -> tuple[Example, Plan]:
    example = made(Joined(**changes), torch.float64)
    split = split_joins(graph_of(example))
    return example, manual_plan(split, parts(split, SHAPES[shape]), batch_size=BATCH)


def test_the_plan_alone_is_enough_and_survives_its_file(tmp_path: Any) -> None:
    example, plan = plain()
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert_trains_alike(example, again, adamw, 1e-10)
    # The graph as it was captured will do as well.
    assert_trains_alike(example, again, adamw, 1e-10, graph_of(example))


def test_a_plan_without_the_split_does_not_run_a_graph_with_it() -> None:
    example, _plan = plain()
    graph = graph_of(example)
    unsplit = manual_plan(graph, [Part("branches join head loss_fn", 6)], batch_size=BATCH)
    with pytest.raises(RuntimeSetupError, match="not the one that was planned"):
        Pipeline(
            example.model, unsplit, example.loss_fn, adamw, graph=split_joins(graph),
            transport="in_process",
        )  # fmt: skip


def test_evaluation_and_prediction() -> None:
    example, plan = plain(between=lambda x, m: functional.dropout(x, 0.5, m.training))
    pipe = Pipeline(example.model, plan, example.loss_fn, transport="in_process")
    model = copy.deepcopy(example.model).eval()
    (x,) = example.args
    want = model(x)
    torch.testing.assert_close(pipe.predict(example.args), want.detach())
    loss = pipe.eval_step(example.args, targets=example.targets)
    torch.testing.assert_close(loss, mean_square(want, example.targets).detach())


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_of_the_concatenation_drops_the_same(inplace: bool) -> None:
    example = made(Joined(lambda x, _: functional.dropout(x, 0.5, True, inplace)), torch.float64)
    graph = graph_of(example)
    split = split_joins(graph)
    whole = manual_plan(graph, [Part("branches join head loss_fn", 6)], batch_size=BATCH)
    stages = parts(split, [(6, 1), (6, 1), (6, 1), (6, 1)])
    stages[1].recompute = True
    cut = manual_plan(split, stages, batch_size=BATCH)
    one = run(example, graph, whole, adamw, transport="in_process", seed=7)
    two = run(example, split, cut, adamw, transport="in_process", seed=7)
    other = run(example, split, cut, adamw, transport="in_process", seed=8)
    assert two[0] == pytest.approx(one[0], rel=1e-10)
    assert other[0] != pytest.approx(one[0], rel=1e-3)
    for name, value in two[1].items():
        torch.testing.assert_close(value, one[1][name], rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_sees_one_weight(norm_type: float) -> None:
    example, plan = plain("sizes and replicas")
    _, state, norms = run(
        example, None, plan, sgd, transport="in_process", clip_norm=0.05, clip_norm_type=norm_type
    )
    model = copy.deepcopy(example.model)
    chosen = sgd(list(model.named_parameters()))
    for step, norm in enumerate(norms):
        batch = halves(example, step)
        chosen.zero_grad()
        mean_square(model(*batch.args), batch.targets).backward()
        want = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
        chosen.step()
        assert norm == pytest.approx(float(want), rel=1e-8)
    for name, value in state.items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-8, atol=1e-8)


def test_weight_decay_by_name() -> None:
    example, plan = plain()

    def grouped(named: Any) -> torch.optim.Optimizer:
        pairs = list(named)
        groups = [
            {"params": [p for n, p in pairs if n == "join.weight"], "weight_decay": 0.3},
            {"params": [p for n, p in pairs if n != "join.weight"], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.01)

    assert_trains_alike(example, plan, grouped, 1e-10)
    pipe = Pipeline(example.model, plan, example.loss_fn, grouped, transport="in_process")
    names = [name for name, _ in pipe.named_parameters()]
    assert names.count("join.weight") == 3
    assert set(names) == {name for name, _ in example.model.named_parameters()}


def test_an_optimizer_that_looks_at_the_whole_weight_is_refused() -> None:
    example, plan = plain()
    build: Callable[..., Any] = torch.optim.Adafactor
    with pytest.raises(RuntimeSetupError, match="Adafactor cannot train a plan with split joins"):
        Pipeline(
            example.model, plan, example.loss_fn, lambda named: build([p for _, p in named]),
            transport="in_process",
        )  # fmt: skip


def test_checkpoints_hold_the_whole_weight(tmp_path: Any) -> None:
    example, plan = plain()
    graph = graph_of(example)
    whole = manual_plan(
        graph, [Part("branches", 3), Part("join head loss_fn", 6)], batch_size=BATCH
    )
    first = Pipeline(example.model, plan, example.loss_fn, adamw, transport="in_process")
    batches = [halves(example, step) for step in range(6)]
    for batch in batches[:3]:
        first.step(batch.args, targets=batch.targets)
    first.save(tmp_path)
    second = Pipeline(example.model, whole, example.loss_fn, adamw, transport="in_process")
    second.load(tmp_path)
    third = Pipeline(example.model, plan, example.loss_fn, adamw, transport="in_process")
    second.save(tmp_path / "again")
    third.load(tmp_path / "again")
    for pipe in (first, second, third):
        for batch in batches[3:]:
            pipe.step(batch.args, targets=batch.targets)
    want = first.state_dict()
    assert want["join.weight"].shape == (8, 12)
    for pipe in (second, third):
        for name, value in pipe.state_dict().items():
            torch.testing.assert_close(value, want[name], rtol=1e-10, atol=1e-10, msg=name)


def test_bf16_autocast_is_as_near_as_the_unsplit_model() -> None:
    example = made(Joined(lambda x, _: x.tanh(), widths=(64, 32, 64)), torch.float32)
    graph = graph_of(example)
    split = split_joins(graph)
    whole = manual_plan(
        graph, [Part("branches", 4), Part("join head loss_fn", 4)], batch_size=BATCH
    )
    cut = manual_plan(split, parts(split, [(4, 1), (4, 1), (4, 1), (4, 1)]), batch_size=BATCH)
    results = [
        run(example, g, p, sgd, transport="in_process", autocast=torch.bfloat16)
        for g, p in ((graph, whole), (split, cut))
    ]
    exact, _ = single_process(example, sgd, 4)
    for one, two, (reference, _) in zip(results[0][0], results[1][0], exact, strict=True):
        assert two == pytest.approx(one, rel=0.01)
        assert two == pytest.approx(reference, rel=0.05)
    pipe = Pipeline(
        example.model, cut, example.loss_fn, sgd, graph=split, transport="in_process",
        autocast=torch.bfloat16,
    )  # fmt: skip
    partial = {op.name for op in split.ops if op.target == "graphpipe.partial_linear"}
    sent = {
        tensor.name: tensor.dtype
        for edge in pipe.first_variant.plan.edges
        for tensor in edge.tensors
    }
    assert {sent[name] for name in partial & sent.keys()} == {"float32"}
    pipe.close()


def test_a_frozen_weight_and_a_frozen_branch() -> None:
    model = Joined()
    model.join.weight.requires_grad_(False)
    model.branches[0].requires_grad_(False)
    example = made(model, torch.float64)
    split = split_joins(graph_of(example))
    plan = manual_plan(split, parts(split, SHAPES["one device a branch"]), batch_size=BATCH)
    assert_trains_alike(example, plan, adamw, 1e-10, split)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("candle-uno-tiny", marks=pytest.mark.long),
        "dlrm-tiny",
        pytest.param("mmt-tiny", marks=pytest.mark.long),
    ],
)
def test_models_of_the_zoo(name: str) -> None:
    job = load_job(f"zoo:{name}")
    torch.manual_seed(0)
    model = job.build_model()
    assert job.data is not None
    assert job.loss_fn is not None
    batch = next(iter(job.data(BATCH, 0)))
    args, targets = pytree.tree_map_only(
        torch.Tensor, lambda v: v.double() if v.is_floating_point() else v,
        (batch.args, batch.targets),
    )  # fmt: skip
    example = Example(model.double(), args, targets, job.loss_fn)
    split = split_joins(graph_of(example))
    total = next(op.name for op in split.ops if op.target == "graphpipe.join_sum")
    after = split.op_index[total]
    late = " ".join(op.name for op in split.ops[after:] if not op.prep)
    slices = len(split.joins[0].widths)
    pieces = [branch_of(split, i) for i in range(slices)]
    # Each partial product on a device with what it alone needs; the sum and the rest on the last.
    ancestors: list[set[str]] = []
    for piece in pieces:
        found, stack = set(), piece.split()
        while stack:
            op = split.op_by_name.get(stack.pop())
            if op is not None and op.name not in found:
                found.add(op.name)
                stack += op.inputs
        ancestors.append(found)
    stages = [Part(" ".join(sorted(names)), 3) for names in ancestors] + [Part(late, 6)]
    plan = manual_plan(split, stages, batch_size=BATCH)
    assert_trains_alike(example, plan, adamw, 1e-10, split)
