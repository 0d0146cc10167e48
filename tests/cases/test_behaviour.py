"""Hard cases whose point is more than equal gradients: randomness, refusals, odd batches."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from graphpipe.errors import CaptureError, InputError, PlanError
from graphpipe.graph.capture import capture
from graphpipe.runtime.pipeline import Pipeline
from tests.cases.models import (
    BATCH,
    CAPTURE_OPTIONS,
    Case,
    Result,
    assert_equal,
    captured,
    load,
    plan_of,
    random_cut,
    reference,
    run,
)
from tests.runtime.manual import Part, manual_plan


def some_cut(name: str, stages: int, seed: int = 0) -> list[tuple[str, ...]]:
    rng = random.Random(f"{name} {stages} {seed}")
    for _ in range(400):
        cut = random_cut(captured(name), stages, rng)
        if cut is not None:
            return cut
    raise AssertionError("no legal cut in 400 tries")


def pipeline(case: Case, stages: int, micro_batch: int, **options: Any) -> Pipeline:
    graph = captured(case.name)
    plan = plan_of(graph, some_cut(case.name, stages), [micro_batch] * stages)
    return Pipeline(
        case.model,
        plan,
        case.loss_fn,
        lambda named: torch.optim.SGD(named, lr=0.1),
        graph=graph,
        transport="in_process",
        capture_options=CAPTURE_OPTIONS.get(case.name, {}),
        **options,
    )


def test_dropout_draws_the_same_masks_wherever_its_stage_runs() -> None:
    name = "a14_dropout"
    graph = captured(name)
    results: list[Result] = []
    for stages, again in ((1, False), (1, True), (3, False), (3, True), (4, True)):
        plan = plan_of(graph, some_cut(name, stages), [4] * stages, recompute=[again] * stages)
        results.append(run(load(name), graph, plan))
    for other in results[1:]:
        assert_equal(other, results[0], 1e-6)
    replicated = plan_of(graph, some_cut(name, 2), [4, 4], replicas=[3, 1])
    assert_equal(run(load(name), graph, replicated), results[0], 1e-6)
    elsewhere = run(load(name), graph, plan_of(graph, some_cut(name, 1), [4]), seed=1)
    assert abs(elsewhere.loss - results[0].loss) > 1e-6


def test_dropout_is_off_in_evaluation_and_evaluation_may_come_first() -> None:
    case = load("a14_dropout")
    pipe = pipeline(case, 3, 4)
    model = load("a14_dropout").model.eval()

    def expected() -> float:
        model.load_state_dict(pipe.state_dict())
        with torch.no_grad():
            assert case.loss_fn is not None
            return float(case.loss_fn(model(*case.args, **case.kwargs), case.targets))

    for mode in ("eval", "train", "eval", "eval", "train", "train", "eval"):
        if mode == "train":
            pipe.step(case.args, case.kwargs, targets=case.targets)
            continue
        want = expected()
        got = pipe.eval_step(case.args, case.kwargs, targets=case.targets)
        assert float(got) == pytest.approx(want, abs=1e-6)
    with torch.no_grad():
        model.load_state_dict(pipe.state_dict())
        torch.testing.assert_close(
            pipe.predict(case.args, case.kwargs), model(*case.args, **case.kwargs)
        )
    pipe.close()


def test_batch_norm_over_one_value_is_refused_with_torchs_own_message() -> None:
    with pytest.raises(PlanError, match="more than 1 value per channel") as caught:
        pipeline(load("a13_batchnorm"), 2, 1)
    assert "at least 2 samples" in str(caught.value)


def test_batch_norm_refuses_a_last_micro_batch_of_one_value_before_anything_runs() -> None:
    case = load("a13_batchnorm")
    pipe = pipeline(case, 2, 4)
    with pytest.raises(InputError, match="more than 1 value per channel"):
        pipe.step(case.args[0][:9], targets=case.targets[:9])
    assert pipe.iterations == 0
    pipe.close()


def test_a_coupled_loss_on_the_whole_mini_batch_equals_full_batch_training() -> None:
    name = "a25_contrastive"
    graph = captured(name)
    joint = " ".join(op.name for op in graph.ops if op.coupled or not op.crossable)
    plan = manual_plan(
        graph,
        [Part("img", 2, recompute=True), Part("txt txt_out", 3), Part(joint, BATCH)],
        batch_size=BATCH,
    )
    first = load(name)
    assert_equal(run(first, graph, plan), reference(name, BATCH), 1e-5)


def test_a_tensor_that_is_not_marked_as_shared_is_refused_by_name() -> None:
    case = load("a09_none_and_flags")
    with pytest.raises(CaptureError, match="class_weight"):
        capture(case.model, case.args, case.kwargs, targets=case.targets, loss_fn=case.loss_fn)


def test_a_missing_keyword_is_refused_by_name_before_anything_runs() -> None:
    case = load("a10_late_kwargs")
    pipe = pipeline(case, 3, 4)
    missing = dict(case.kwargs)
    name = sorted(missing)[0]
    del missing[name]
    with pytest.raises(InputError, match=name):
        pipe.step(case.args, missing, targets=case.targets)
    assert pipe.iterations == 0
    pipe.close()


def test_a_step_without_the_optional_images_trains_the_rest() -> None:
    with_images = load("a18_optional_modality")
    text_only = load("a18_optional_modality", "build_text_only")
    pipe = pipeline(with_images, 3, 4, variants="capture")
    plain = load("a18_optional_modality").model
    chosen = torch.optim.SGD(plain.parameters(), lr=0.1)
    for case in (with_images, text_only, with_images, text_only):
        chosen.zero_grad()
        assert case.loss_fn is not None
        loss = case.loss_fn(plain(*case.args, **case.kwargs), case.targets)
        loss.backward()
        chosen.step()
        got = pipe.step(case.args, case.kwargs, targets=case.targets)
        assert float(got) == pytest.approx(float(loss.detach()), abs=1e-5)
        gradients = {name: p.grad for name, p in pipe.named_parameters()}
        for name, parameter in plain.named_parameters():
            assert (gradients[name] is None) == (parameter.grad is None), name
    state = pipe.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    pipe.close()


def test_an_unknown_variant_is_refused_where_variants_were_not_asked_for() -> None:
    pipe = pipeline(load("a18_optional_modality"), 3, 4)
    text_only = load("a18_optional_modality", "build_text_only")
    with pytest.raises(InputError, match="images"):
        pipe.step(text_only.args, text_only.kwargs, targets=text_only.targets)
    pipe.close()


@pytest.mark.parametrize("samples", [10, 7, 1])
def test_a_short_last_batch_equals_a_single_process(samples: int) -> None:
    case = load("a17_token_mean_loss")
    pipe = pipeline(case, 3, 3)
    inputs, targets = case.args[0][:samples], case.targets[:samples]
    got = pipe.step(inputs, targets=targets)
    plain = load("a17_token_mean_loss").model
    assert case.loss_fn is not None
    loss = case.loss_fn(plain(inputs), targets)
    loss.backward()
    assert float(got) == pytest.approx(float(loss.detach()), abs=1e-6)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(
            parameter.grad, plain.get_parameter(name).grad, rtol=1e-5, atol=1e-6
        )
    pipe.close()


def test_other_sequence_lengths_train_on_the_same_partition() -> None:
    case = load("a17_token_mean_loss")
    pipe = pipeline(case, 3, 3, variants="capture")
    plain = load("a17_token_mean_loss").model
    for length in (8, 5, 8):
        inputs, targets = case.args[0][:, :length], case.targets[:, :length]
        plain.zero_grad()
        assert case.loss_fn is not None
        loss = case.loss_fn(plain(inputs), targets)
        loss.backward()
        got = pipe.accumulate(inputs, targets=targets)
        assert float(got) == pytest.approx(float(loss.detach()), abs=1e-6)
        pipe.update()
        with torch.no_grad():
            for parameter in plain.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
    pipe.close()


@pytest.mark.parametrize("positive", [True, False])
def test_an_opaque_module_equals_eager_on_both_of_its_branches(positive: bool) -> None:
    name = "a27_data_dependent"
    graph = captured(name)
    case, plain = load(name), load(name)
    sign = 1.0 if positive else -1.0
    args = tuple(value * sign if value.is_floating_point() else value for value in case.args)
    plan = plan_of(graph, some_cut(name, 2), [BATCH, BATCH])
    pipe = Pipeline(
        case.model,
        plan,
        case.loss_fn,
        lambda named: torch.optim.SGD(named, lr=0.0),
        graph=graph,
        transport="in_process",
        capture_options=CAPTURE_OPTIONS[name],
    )
    got = pipe.step(args, case.kwargs, targets=case.targets)
    assert plain.loss_fn is not None
    loss = plain.loss_fn(plain.model(*args, **plain.kwargs), plain.targets)
    loss.backward()
    assert float(got) == pytest.approx(float(loss.detach()), abs=1e-6)
    for key, parameter in pipe.named_parameters():
        want = plain.model.get_parameter(key).grad
        assert (parameter.grad is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(parameter.grad, want, rtol=1e-5, atol=1e-6)
    pipe.close()


def test_data_dependent_control_flow_names_module_line_and_remedy() -> None:
    case = load("a27_data_dependent")
    with pytest.raises(CaptureError, match=r"router.*a27_data_dependent\.py:\d+.*opaque"):
        capture(case.model, case.args, targets=case.targets, loss_fn=case.loss_fn)
