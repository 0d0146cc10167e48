"""The hard model cases: captured once, equal to eager for every number of samples."""

from __future__ import annotations

import importlib.util
import warnings
from functools import lru_cache
from typing import Any

import pytest
import torch

from graphpipe.errors import CaptureError
from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.graph.signature import bind_inputs
from tests.graph.eager import assert_equals_eager, assert_rows_are_independent, first
from tests.samples import cases_dir

QUICK = [
    "a02_tied_embedding",
    "a06_nondiff_tensors",
    "a08_dict_output",
    "a09_none_and_flags",
    "a11_view_noncontig",
    "a13_batchnorm",
    "a15_aux_loss_mid",
    "a17_token_mean_loss",
    "a18_optional_modality",
    "a20_shape_ints_consts",
    "a25_contrastive",
]
SLOW = [
    "a01_skip_unet",
    "a08_nested_outputs",
    "a10_late_kwargs",
    "a14_dropout",
    "a01_skip_long",
    "a04_frozen_branch",
    "a23_dlrm",
    "a23_mm_transformer",
    "a23_wide_towers",
]
NAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in SLOW)]
OPTIONS: dict[str, dict[str, Any]] = {"a09_none_and_flags": {"not_per_sample": ["class_weight"]}}


@lru_cache
def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, cases_dir() / "models" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@lru_cache
def captured(name: str) -> tuple[ModelGraph, Any, Any, Any, Any, Any]:
    module = load(name)
    model, args, kwargs, loss_fn = module.build()
    targets = module.target()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = capture(
            model, args, kwargs, targets=targets, loss_fn=loss_fn, **OPTIONS.get(name, {})
        )
    return graph, model, args, kwargs, targets, loss_fn


@pytest.mark.parametrize("name", NAMES)
def test_a_capture_equals_eager_for_every_number_of_samples(name: str) -> None:
    graph, model, args, kwargs, targets, loss_fn = captured(name)
    for samples in (1, 2, 3, 4, 6, 12):
        if graph.broken_conditions((op.name for op in graph.ops), samples):
            continue
        assert_equals_eager(
            graph,
            model,
            first(args, samples, 12),
            first(kwargs, samples, 12),
            first(targets, samples, 12),
            loss_fn,
        )


@pytest.mark.parametrize("name", NAMES)
def test_values_that_may_cross_a_boundary_are_per_sample(name: str) -> None:
    graph, model, args, kwargs, targets, _ = captured(name)
    model.eval()
    tensors, batch = bind_inputs(graph, graph.program, args, kwargs, targets)  # type: ignore[arg-type]
    assert assert_rows_are_independent(graph, tensors, batch) > 0
    model.train()


@pytest.mark.parametrize(
    ("name", "terms"),
    [
        ("a20_shape_ints_consts", ["mean"]),
        ("a08_dict_output", ["mean", "mean", "mean"]),
        ("a15_aux_loss_mid", ["sum_count", "mean", "mean", "mean"]),
        ("a17_token_mean_loss", ["sum_count"]),
        ("a25_contrastive", ["coupled", "coupled"]),
    ],
)
def test_every_addend_of_the_loss_is_a_sink_with_its_reduction(name: str, terms: list[str]) -> None:
    graph, *_ = captured(name)
    assert [term.reduction for term in graph.loss_terms] == terms


def test_only_the_loss_of_a_contrastive_model_is_coupled() -> None:
    graph, *_ = captured("a25_contrastive")
    by_name = graph.op_by_name
    towers = [op for op in graph.ops if op.module.startswith(("img", "txt"))]
    assert towers
    assert not any(op.coupled for op in towers)
    assert all(by_name[term.op].coupled for term in graph.loss_terms)


def test_batch_norm_couples_and_needs_two_samples() -> None:
    graph, *_ = captured("a13_batchnorm")
    coupled = {op.name for op in graph.ops if op.coupled}
    assert coupled == {"batch_norm", "batch_norm_1", "batch_norm_2"}
    assert [c.op for c in graph.batch_conditions] == ["batch_norm_2"]
    assert graph.broken_conditions(["batch_norm_2"], 1)
    assert not graph.broken_conditions(["batch_norm_2"], 2)
    assert not graph.broken_conditions(["batch_norm"], 1)
    assert any("mix the samples" in text for text in graph.warnings)


def test_a_tied_parameter_has_one_name_and_the_models_own_object() -> None:
    graph, model, *_ = captured("a02_tied_embedding")
    tied = graph.parameter_by_name["tok.weight"]
    assert tied.aliases == ("head.weight",)
    readers = [op.target for op in graph.ops if "tok.weight" in op.parameters]
    assert readers == ["aten.embedding.default", "aten.linear.default"]
    assert graph.program is not None
    assert graph.program.state["tok.weight"] is model.tok.weight
    assert graph.program.module.get_parameter("tok.weight") is model.tok.weight


@pytest.mark.long
def test_a_frozen_tower_has_no_backward_and_saves_nothing() -> None:
    graph, *_ = captured("a04_frozen_branch")
    tower = [op for op in graph.ops if op.module.startswith("vision")]
    assert tower
    for op in tower:
        assert not op.requires_grad
        assert op.saves == ()
        assert (op.backward.flops, op.backward.kernels) == (0, 0)
    adapter = next(op for op in graph.ops if op.module == "adapter")
    assert adapter.requires_grad


def test_the_message_for_data_dependent_control_flow(capfd: pytest.CaptureFixture[str]) -> None:
    module = load("a27_data_dependent")
    model, args, kwargs, loss_fn = module.build()
    with pytest.raises(CaptureError) as error:
        capture(model, args, kwargs, targets=module.target(), loss_fn=loss_fn)
    text = str(error.value)
    assert "module 'router'" in text
    assert "a27_data_dependent.py:21" in text
    assert "if x.mean() > 0:" in text
    assert "opaque=['router']" in text
    captured_output = capfd.readouterr()
    assert captured_output.out + captured_output.err == ""


@pytest.mark.parametrize("how", ["path", "class"])
def test_an_opaque_module_equals_eager_on_both_branches(how: str) -> None:
    module = load("a27_data_dependent")
    model, args, kwargs, loss_fn = module.build()
    targets = module.target()
    with pytest.warns(UserWarning, match="router"):
        graph = capture(
            model,
            args,
            kwargs,
            targets=targets,
            loss_fn=loss_fn,
            opaque=["router"] if how == "path" else [module.Router],
        )
    router = graph.op_by_name["router"]
    assert router.target == "opaque"
    assert router.coupled
    assert set(router.parameters) == {
        "router.pos.weight",
        "router.pos.bias",
        "router.neg.weight",
        "router.neg.bias",
    }
    for inputs in (args, module.inputs_other_branch()):
        assert_equals_eager(graph, model, inputs, kwargs, targets, loss_fn)


def test_variants_share_the_keys_of_what_they_have_in_common() -> None:
    graph, *_ = captured("a18_optional_modality")
    module = load("a18_optional_modality")
    model, args, kwargs, loss_fn = module.build_text_only()
    text_only = capture(model, args, kwargs, targets=module.target(), loss_fn=loss_fn)
    assert len(text_only.ops) < len(graph.ops)
    assert {op.key for op in text_only.ops} <= {op.key for op in graph.ops}
    assert {item.path for item in text_only.inputs} == {"args[0]", "targets"}
    assert torch.equal(model.out.weight, text_only.program.state["out.weight"])  # type: ignore[union-attr]
