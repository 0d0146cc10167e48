"""Training as people do it: clipping, accumulation, precision, schedulers, evaluation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from graphpipe.errors import InputError, PlanError, RuntimeSetupError
from graphpipe.graph.capture import capture
from graphpipe.runtime.launch import launch
from graphpipe.runtime.optimize import LossScale
from graphpipe.runtime.pipeline import Pipeline
from tests.runtime.equality import adamw, example, halves, sgd, single_process
from tests.runtime.manual import Part, manual_plan
from tests.runtime.models import Example, cross_entropy

TIED = [Part("embedding", 2, replicas=2), Part("middle", 4), Part("head", 4)]
DIAMOND = [Part("stem", 2), Part("a", 4), Part("b", 2, replicas=2), Part("cat", 4)]


def _pipe(name: str, parts: list[Part], optimizer: Any = sgd, **options: Any) -> Pipeline:
    made, graph = example(name)
    plan = manual_plan(graph, parts, batch_size=options.pop("batch_size", 12))
    options.setdefault("transport", "in_process")
    return Pipeline(made.model, plan, made.loss_fn, optimizer, graph=graph, **options)


def _same_state(pipe: Pipeline, model: nn.Module, tolerance: float = 1e-6) -> None:
    for name, value in pipe.state_dict().items():
        other = model.state_dict()[name]
        torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_counts_tied_and_replicated_parameters_once(norm_type: float) -> None:
    made, _ = example("tied")
    model = copy.deepcopy(made.model)
    chosen = sgd(list(model.named_parameters()))
    pipe = _pipe("tied", TIED, clip_norm=0.05, clip_norm_type=norm_type)
    for step in range(3):
        batch = halves(made, step)
        pipe.step(batch.args, targets=batch.targets)
        chosen.zero_grad()
        made.loss_fn(model(*batch.args), batch.targets).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
        chosen.step()
        assert pipe.last_gradient_norm == pytest.approx(float(norm), rel=1e-5)
    _same_state(pipe, model, 1e-5)


def test_accumulating_mini_batches_equals_their_mean() -> None:
    made, _ = example("diamond")
    model = copy.deepcopy(made.model)
    chosen = sgd(list(model.named_parameters()))
    pipe = _pipe("diamond", DIAMOND)
    for step in range(2):
        chosen.zero_grad()
        for part in range(3):
            batch = halves(made, 3 * step + part)
            loss = made.loss_fn(model(*batch.args), batch.targets)
            (loss / 3).backward()
            got = pipe.accumulate(batch.args, targets=batch.targets, factor=1 / 3)
            assert float(got) == pytest.approx(float(loss.detach()), rel=1e-6)
        pipe.update()
        chosen.step()
    _same_state(pipe, model)


def test_loss_scaling_changes_nothing_until_a_gradient_overflows() -> None:
    made, _ = example("diamond")
    history, state = single_process(made, sgd, 2)
    scale = LossScale(initial=1024.0, growth_interval=2)
    pipe = _pipe("diamond", DIAMOND, loss_scale=scale)
    for step in range(2):
        batch = halves(made, step)
        loss = pipe.step(batch.args, targets=batch.targets)
        assert float(loss) == pytest.approx(history[step][0], rel=1e-6)
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-6)
    scales = {worker.scale.scale for worker in pipe.workers if worker.scale is not None}
    assert scales == {2048.0}


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    made, _ = example("diamond")
    pipe = _pipe("diamond", DIAMOND, loss_scale=LossScale(initial=4.0))
    before = pipe.state_dict()
    name, parameter = pipe.named_parameters()[0]
    handle = parameter.register_hook(lambda gradient: gradient * float("inf"))
    pipe.step(made.args, targets=made.targets)
    handle.remove()
    assert pipe.last_step_skipped
    for key, value in pipe.state_dict().items():
        assert torch.equal(value, before[key]), (key, name)
    assert {w.scale.scale for w in pipe.workers if w.scale is not None} == {2.0}
    pipe.step(made.args, targets=made.targets)
    assert not pipe.last_step_skipped


def test_autocast_equals_a_single_process_under_autocast() -> None:
    made, _ = example("diamond")
    model = copy.deepcopy(made.model)
    chosen = sgd(list(model.named_parameters()))
    pipe = _pipe("diamond", DIAMOND, autocast=torch.bfloat16)
    for step in range(3):
        batch = halves(made, step)
        loss = pipe.step(batch.args, targets=batch.targets)
        chosen.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            other = made.loss_fn(model(*batch.args), batch.targets)
        other.backward()
        chosen.step()
        assert float(loss) == pytest.approx(float(other.detach()), abs=0.02)
    _same_state(pipe, model, 0.02)
    # What crosses the stages really is bf16, and differs from fp32.
    exact = _pipe("diamond", DIAMOND)
    loss, half = (
        exact.step(made.args, targets=made.targets),
        _pipe("diamond", DIAMOND, autocast=torch.bfloat16).step(made.args, targets=made.targets),
    )
    assert float(loss) != float(half)


def test_schedulers_work_on_every_rank_even_without_parameters() -> None:
    made, graph = example("types")
    plan = manual_plan(
        graph, [Part("a", 4), Part("gt mul where", 4), Part("b c table", 4)], batch_size=12
    )

    def run() -> tuple[list[float], int]:
        pipe = Pipeline(made.model, plan, made.loss_fn, sgd, graph=graph, timeout=60)
        scheduler = torch.optim.lr_scheduler.StepLR(pipe.optimizer, 1, gamma=0.5)
        rates = []
        for _ in range(3):
            pipe.step(made.args, targets=made.targets)
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
        return rates, len(pipe.named_parameters())

    results = launch(run, plan.world_size, timeout=60, threads=1, method="fork")
    assert [rates for rates, _ in results] == [[0.05, 0.025, 0.0125]] * 3
    assert [count for _, count in results] == [2, 0, 5]


def test_groups_by_name_and_lbfgs() -> None:
    made, _ = example("diamond")

    def groups(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        bias = [p for n, p in named if n.endswith("bias")]
        rest = [p for n, p in named if not n.endswith("bias")]
        decay = [{"params": rest, "weight_decay": 0.1}, {"params": bias, "weight_decay": 0.0}]
        return torch.optim.SGD(decay, lr=0.1)

    _, state = single_process(made, groups, 2)
    pipe = _pipe("diamond", DIAMOND, groups)
    for step in range(2):
        batch = halves(made, step)
        pipe.step(batch.args, targets=batch.targets)
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-6, atol=1e-6)
    with pytest.raises(RuntimeSetupError, match="LBFGS"):
        _pipe("diamond", DIAMOND, lambda named: torch.optim.LBFGS([p for _, p in named]))
    with pytest.raises(RuntimeSetupError, match="did not return an optimizer"):
        _pipe("diamond", DIAMOND, lambda named: None)


@pytest.mark.parametrize("samples", [1, 5, 7, 11])
def test_a_last_batch_of_any_size_trains(samples: int) -> None:
    made, _ = example("diamond")
    model = copy.deepcopy(made.model)
    pipe = _pipe("diamond", DIAMOND)
    x, y = made.args[0][:samples], made.targets[:samples]
    loss = pipe.step((x,), targets=y)
    other = made.loss_fn(model(x), y)
    other.backward()
    assert float(loss) == pytest.approx(float(other.detach()), rel=1e-6)
    gradients = dict(pipe.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            gradients[name].grad, parameter.grad, rtol=1e-6, atol=1e-6, msg=name
        )


def test_train_and_evaluation_mix_in_any_order() -> None:
    made, _ = example("tied")
    model = copy.deepcopy(made.model)
    pipe = _pipe("tied", TIED)
    chosen = sgd(list(model.named_parameters()))
    for step in range(3):
        batch = halves(made, step)
        with torch.no_grad():
            output = model.eval()(*batch.args)
            loss = made.loss_fn(output, batch.targets)
        assert float(pipe.eval_step(batch.args, targets=batch.targets)) == pytest.approx(
            float(loss), rel=1e-6
        )
        torch.testing.assert_close(pipe.predict(batch.args), output, rtol=1e-5, atol=1e-6)
        small = tuple(item[:7] for item in batch.args)
        torch.testing.assert_close(pipe.predict(small), output[:7], rtol=1e-5, atol=1e-6)
        pipe.step(batch.args, targets=batch.targets)
        chosen.zero_grad()
        made.loss_fn(model.train()(*batch.args), batch.targets).backward()
        chosen.step()
    _same_state(pipe, model)


def test_other_lengths_and_other_inputs_are_refused_or_captured() -> None:
    made, _ = example("tied")
    pipe = _pipe("tied", TIED)
    longer = torch.randint(0, 11, (12, 7))
    with pytest.raises(InputError, match="another shape"):
        pipe.step((longer,), targets=longer)
    with pytest.raises(InputError, match="dtype"):
        pipe.step((made.args[0].float(),), targets=made.targets)
    with pytest.raises(InputError):
        pipe.step(made.args)  # no targets
    model = copy.deepcopy(made.model)
    chosen = sgd(list(model.named_parameters()))
    pipe = _pipe("tied", TIED, variants="capture")
    for ids in (made.args[0], longer, made.args[0], longer[:6]):
        loss = pipe.step((ids,), targets=ids)
        chosen.zero_grad()
        other = made.loss_fn(model(ids), ids)
        other.backward()
        chosen.step()
        assert float(loss) == pytest.approx(float(other.detach()), rel=1e-5)
    _same_state(pipe, model, 1e-5)


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Linear(4, 5)
        self.image = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, text: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        h = self.text(text).tanh()
        if image is not None:
            h = h + self.image(image).tanh()
        return self.head(h)


def test_a_modality_may_be_missing_in_a_step() -> None:
    torch.manual_seed(0)
    text, image = torch.randn(12, 4), torch.randn(12, 6)
    labels = torch.randint(0, 3, (12,))
    model = Optional()
    graph = capture(model, (text,), {"image": image}, targets=labels, loss_fn=cross_entropy)
    plan = manual_plan(
        graph, [Part("text", 2), Part("image", 3, replicas=2), Part("add head", 6)], batch_size=12
    )
    pipe = Pipeline(
        model, plan, cross_entropy, adamw, graph=graph, transport="in_process", variants="capture"
    )
    twin = copy.deepcopy(model)
    chosen = adamw(list(twin.named_parameters()))
    for kwargs in ({"image": image}, {}, {"image": None}, {"image": image}):
        loss = pipe.step((text,), kwargs, targets=labels)
        chosen.zero_grad()
        other = cross_entropy(twin(text, **kwargs), labels)
        other.backward()
        chosen.step()
        assert float(loss) == pytest.approx(float(other.detach()), abs=1e-5)
    # Without the image its parameters have no gradient, so AdamW leaves them alone.
    _same_state(pipe, twin, 1e-4)


class Recommender(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            [nn.EmbeddingBag(50, 4, mode="sum", sparse=sparse) for _ in range(3)]
        )
        self.dense = nn.Linear(5, 4)
        self.top = nn.Linear(16, 1)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        parts = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return self.top(torch.cat([self.dense(dense), *parts], 1)).squeeze(1)


def _split(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.5)


def test_sparse_embedding_gradients_stay_sparse_and_are_right() -> None:
    torch.manual_seed(0)
    model = Recommender(sparse=True)
    dense, ids = torch.randn(12, 5), torch.randint(0, 50, (12, 3, 4))
    target = torch.rand(12)
    loss_fn = nn.functional.binary_cross_entropy_with_logits
    graph = capture(model, (dense, ids), targets=target, loss_fn=loss_fn)
    made = Example(model, (dense, ids), target, loss_fn)
    plan = manual_plan(
        graph,
        [Part("tables.0 select", 2, replicas=2), Part("tables.1 tables.2", 4, replicas=3),
         Part("dense", 4), Part("cat top", 4)],
        batch_size=12,
    )  # fmt: skip
    pipe = Pipeline(model, plan, loss_fn, _split, graph=graph, transport="in_process")
    history, state = single_process(made, _split, 3)
    for step in range(3):
        batch = halves(made, step)
        loss = pipe.step(batch.args, targets=batch.targets)
        assert float(loss) == pytest.approx(history[step][0], rel=1e-6)
        for name, parameter in pipe.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.is_sparse == name.startswith("tables")
    for name, value in pipe.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-6)


def test_compiled_stages_train_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = example("chain")
    compiled: list[str] = []

    def stand_in(module: nn.Module, **options: Any) -> Any:
        compiled.append(type(module).__name__)
        return module.forward

    monkeypatch.setattr(torch, "compile", stand_in)
    pipe = _pipe("chain", [Part("a b", 4), Part("c d", 4)], compile=True)
    history, _ = single_process(made, sgd, 2)
    for step in range(2):
        batch = halves(made, step)
        loss = pipe.step(batch.args, targets=batch.targets)
        assert float(loss) == pytest.approx(history[step][0], rel=1e-6)
    assert compiled == ["Stage0", "Stage1"]


@pytest.mark.long
def test_really_compiled_stages_train_alike() -> None:
    made, _ = example("chain")
    pipe = _pipe("chain", [Part("a b", 4), Part("c d", 4)], compile=True)
    history, _ = single_process(made, sgd, 2)
    for step in range(2):
        batch = halves(made, step)
        loss = pipe.step(batch.args, targets=batch.targets)
        assert float(loss) == pytest.approx(history[step][0], rel=1e-5)


def test_setup_mistakes_are_named() -> None:
    made, graph = example("chain")
    plan = manual_plan(graph, [Part("a b", 4), Part("c d", 4)], batch_size=12)
    with pytest.raises(RuntimeSetupError, match="does not know its rank"):
        Pipeline(made.model, plan, made.loss_fn, sgd, graph=graph)
    other, other_graph = example("diamond")
    with pytest.raises(RuntimeSetupError, match="not the one that was planned"):
        Pipeline(other.model, plan, other.loss_fn, sgd, graph=other_graph, transport="in_process")
    broken = plan.model_copy(update={"stages": plan.stages[:1]})
    with pytest.raises((RuntimeSetupError, PlanError)):
        Pipeline(made.model, broken, made.loss_fn, sgd, graph=graph, transport="in_process")


def _wrong_world() -> str:
    made, graph = example("chain")
    plan = manual_plan(graph, [Part("a", 4), Part("b", 4), Part("c d", 4)], batch_size=12)
    try:
        Pipeline(made.model, plan, made.loss_fn, sgd, graph=graph, timeout=20)
    except RuntimeSetupError as error:
        return str(error)
    return "no error"


def test_another_world_size_is_refused_with_the_same_words_on_every_rank() -> None:
    example("chain")
    texts = launch(_wrong_world, 2, timeout=20, threads=1, method="fork")
    assert texts[0] == texts[1]
    assert "Expected 3 processes" in texts[0]


class Counting(nn.Module):
    """Counts its calls in a buffer, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1.0)
        return self.layer(x) + self.calls


def test_what_an_evaluation_leaves_in_a_buffer_stays() -> None:
    model, x, labels = Counting(), torch.randn(4, 4), torch.randint(0, 3, (4,))
    graph = capture(model, (x,), targets=labels, loss_fn=cross_entropy)
    plan = manual_plan(graph, [Part("layer", 4)], batch_size=4)
    pipe = Pipeline(model, plan, cross_entropy, sgd, graph=graph, transport="in_process")
    for run in (pipe.step, pipe.eval_step, pipe.step, pipe.eval_step):
        run((x,), targets=labels)
    assert pipe.state_dict()["calls"].tolist() == [4.0] * 3


class Late(nn.Module):
    """An optional first stage, so that the stages of the variant without it have other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(3, 4), nn.Linear(3, 4)
        self.deep, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        h = self.deep(self.text(x).tanh())
        return self.head(h if image is None else h + self.image(image))


def test_gradients_are_summed_after_the_last_backward_of_a_variant() -> None:
    torch.manual_seed(0)
    model, x, image, labels = (
        Late(),
        torch.randn(6, 3),
        torch.randn(6, 3),
        torch.randint(0, 3, (6,)),
    )
    graph = capture(model, (x,), {"image": image}, targets=labels, loss_fn=cross_entropy)
    # The first rank hosts two stages, and shares the parameters of one with another rank.
    parts = [Part("image", 2, (2,)), Part("text", 2, (0, 1), 2), Part("deep", 2, (0,)),
             Part("head", 2, (3,))]  # fmt: skip
    plan = manual_plan(graph, parts, batch_size=6)
    pipe = Pipeline(
        model, plan, cross_entropy, sgd, graph=graph, transport="in_process", variants="capture"
    )
    pipe.step((x,), targets=labels)
    cross_entropy(model(x), labels).backward()
    for name, parameter in pipe.named_parameters():
        want = model.get_parameter(name).grad
        assert (parameter.grad is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(parameter.grad, want)
