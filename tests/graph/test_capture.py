"""``capture``: every trap of exporting a model, on models as small as they get."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from graphpipe.errors import CaptureError
from graphpipe.graph.autocast import call_under_autocast
from graphpipe.graph.capture import CoupledBatchWarning, capture
from graphpipe.graph.model_graph import ModelGraph
from tests.graph.eager import assert_equals_eager, run_program

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
Y = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    """A linear layer and whatever ``body`` does with it."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.body = body

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> Any:
        return self.body(self, x, *rest)


def mse(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(out, y)


def equal(body: Any, **options: Any) -> ModelGraph:
    """Captures, compares with eager at several sizes, and returns the graph."""
    model = Net(body)
    graph = capture(model, (X,), targets=Y, loss_fn=mse, **options)
    for samples in (1, 3, 4):
        assert_equals_eager(graph, model, (X[:samples],), None, Y[:samples], mse)
    return graph


def targets_of(graph: ModelGraph) -> list[str]:
    return [op.target for op in graph.ops]


def test_no_grad_regions_are_inlined_and_have_no_backward() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        h = net.linear(x)
        with torch.no_grad():
            scale = torch.sigmoid(net.second(h)) * 2
        return h * scale

    graph = equal(body)
    second = [op for op in graph.ops if op.module == "second"]
    assert second
    assert not any(op.requires_grad or op.saves for op in second)
    assert not any("wrap" in target for target in targets_of(graph))


def test_autocast_regions_are_cut_into_ops() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = torch.relu_(net.linear(x)) @ net.second.weight
        with torch.autocast("cpu", enabled=False):
            return net.second(h.float())

    model = Net(body)
    graph = capture(model, (X,), targets=Y, loss_fn=mse)
    assert_equals_eager(graph, model, (X,), None, Y, mse, atol=1e-2)
    assert graph.program is not None
    wrapped = [n for n in graph.program.module.graph.nodes if n.target is call_under_autocast]
    assert [node.args[2] for node in wrapped] == [True, True, True, False, False]
    first = graph.op_by_name["linear"]
    assert first.target == "aten.linear.default"
    assert first.output is not None
    assert first.output.dtype == "bfloat16"


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_is_inlined(reentrant: bool) -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        h = net.linear(x)
        return checkpoint(lambda v: torch.tanh(net.second(v)), h, use_reentrant=reentrant)

    assert targets_of(equal(body))[1:3] == ["aten.linear.default", "aten.tanh.default"]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 20


bound_early = Doubled.apply


def test_a_custom_autograd_function_is_refused_by_name_even_if_bound_early() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return bound_early(x)

    with pytest.raises(CaptureError) as error:
        capture(nn.Sequential(nn.Linear(3, 3), Inner()), (X,), targets=Y, loss_fn=mse)
    text = str(error.value)
    assert "Doubled" in text
    assert "module '1'" in text
    assert "opaque=['1']" in text


def test_a_custom_autograd_function_works_within_an_opaque_module() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return bound_early(x)

    model = nn.Sequential(nn.Linear(3, 3), Inner())
    graph = capture(model, (X,), targets=Y, loss_fn=mse, opaque=["1"], per_sample_ops=["1"])
    assert not any(op.coupled for op in graph.ops)
    assert_equals_eager(graph, model, (X,), None, Y, mse)


@torch.library.custom_op("graphpipe_tests::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


triple.register_fake(torch.empty_like)
triple.register_autograd(lambda ctx, gradient: gradient * 3)


def test_a_custom_op_is_kept_as_one_op() -> None:
    with pytest.warns(CoupledBatchWarning, match="per_sample_ops"):
        graph = equal(lambda net, x: triple(net.linear(x)))
    assert "graphpipe_tests.triple.default" in targets_of(graph)
    quiet = equal(
        lambda net, x: triple(net.linear(x)), per_sample_ops=["graphpipe_tests.triple.default"]
    )
    assert not any(op.coupled for op in quiet.ops)
    assert quiet.op_by_name["triple"].crossable


def test_sizes_are_arithmetic_on_the_micro_batch_and_checks_are_gone() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        h = net.linear(x).to(torch.float64).to(x.dtype)
        h = h.reshape(rows * width).reshape(rows, -1) / x.shape[0] * len(x)
        return h + torch.zeros(rows, width)

    graph = equal(body)
    assert not any("sym_size" in target or "assert" in target for target in targets_of(graph))
    assert graph.program is not None
    nodes = list(graph.program.module.graph.nodes)
    assert nodes[0].name == "micro_batch_size"
    names = {op.name for op in graph.ops}
    for node in nodes:
        if node.op == "call_function" and node.name not in names:
            assert {source.name for source in node.all_input_nodes} <= {"micro_batch_size"}


def test_squeeze_spares_the_batch_of_one_sample() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        return net.linear(x)[:, None].squeeze().squeeze(0)

    graph = capture(Net(body), (X,), targets=Y, loss_fn=mse)
    _, output = run_program(graph, (X[:1],), None, Y[:1])
    assert output.shape == (1, 3)


def test_in_place_ops_join_everything_on_their_storage() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        buffer = torch.zeros(x.shape[0], 3)
        before = buffer + 1
        buffer[:, 0] = net.linear(x)[:, 1]
        return net.second(buffer) + before

    graph = equal(body)
    by_name = graph.op_by_name
    written = next(op for op in graph.ops if op.target == "aten.copy_.default")
    members = {op.name for op in graph.ops if op.group == written.group}
    # The buffer, the view that is written to, and who reads it before that.
    assert {"zeros", "add", "select_1"} <= members
    assert by_name["zeros"].requires_grad
    assert by_name["linear_1"].group is None


def test_tuples_stay_with_their_items() -> None:
    graph = equal(lambda net, x: torch.cat(net.linear(x).split([1, 2], dim=1)[::-1], dim=1))
    split = next(op for op in graph.ops if op.target.startswith("aten.split"))
    items = [op for op in graph.ops if op.target == "getitem"]
    assert split.output is None
    assert len(items) == 2
    assert {op.group for op in (split, *items)} == {split.group}
    assert split.group is not None


def test_an_input_that_the_model_writes_to_is_copied_first() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return net.linear(x)

    graph = equal(body)
    mine = X.clone()
    run_program(graph, (mine,), None, Y)
    assert torch.equal(mine, X)


def test_meta_models_and_examples_give_the_same_graph() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0], device=x.device)
        return net.linear(x) * scale + torch.arange(3, device=x.device)

    real = equal(body)
    with torch.device("meta"):
        model = Net(body)
        graph = capture(
            model, (torch.empty(4, 3),), targets=torch.empty(4, 3), loss_fn=mse, name=real.name
        )
    assert graph.fingerprint == real.fingerprint
    assert graph.program is not None
    (constant,) = (n for n in graph.program.state if n.startswith("_constants."))
    assert torch.equal(graph.program.state[constant], torch.tensor([1.0, 2.0, 3.0]))
    assert graph.program.state["linear.weight"] is model.linear.weight


def test_the_models_own_state_is_untouched() -> None:
    model = Net(lambda net, x: net.second(net.linear(x)))
    model.second.eval()
    parameters = dict(model.named_parameters())
    capture(model, (X,), targets=Y, loss_fn=mse)
    assert dict(model.named_parameters()) == parameters
    assert all(a is b for a, b in zip(parameters.values(), model.parameters(), strict=True))
    assert model.training
    assert not model.second.training
    assert all(p.grad is None for p in model.parameters())


def test_evaluation_mode_has_no_gradients_and_no_dropout() -> None:
    model = Net(lambda net, x: F.dropout(net.linear(x), 0.5, net.training))
    train = capture(model, (X,), targets=Y, loss_fn=mse)
    test = capture(model, (X,), targets=Y, loss_fn=mse, training=False)
    assert [op.random for op in train.ops] == [False, True, False]
    assert targets_of(test) == ["aten.linear.default", "aten.mse_loss.default"]
    assert not any(op.requires_grad or op.saves or op.backward.kernels for op in test.ops)
    assert {op.key for op in test.ops} < {op.key for op in train.ops}
    assert model.training


def test_a_transformer_layer_keeps_its_ops_in_evaluation() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    x = torch.randn(2, 3, 4)
    graph = capture(layer, (x,), training=False)
    assert graph.loss_terms == ()
    assert any(op.module == "linear1" for op in graph.ops)


def test_a_transformer_with_a_mask_that_is_causal_is_captured() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    inputs = (torch.randn(4, 5, 8), torch.randn(4, 3, 8))

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    graph = capture(model, inputs, {"tgt_mask": mask}, loss_fn=loss_fn,
                    not_per_sample=["kwargs['tgt_mask']"])  # fmt: skip
    assert_equals_eager(graph, model, inputs, {"tgt_mask": mask}, None, loss_fn)


def test_a_cumulative_batch_norm_is_refused_with_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(CaptureError, match=r"'1'.*momentum"):
        capture(model, torch.randn(4, 3), loss_fn=torch.mean)
    assert capture(model, torch.randn(4, 3), loss_fn=torch.mean, training=False).ops


def test_a_model_may_return_its_loss_alone_or_in_a_dict() -> None:
    def alone(net: Net, x: torch.Tensor) -> torch.Tensor:
        return net.linear(x).pow(2).mean()

    def within(net: Net, x: torch.Tensor) -> Any:
        h = net.linear(x)
        return {"loss": h.pow(2).mean(), "h": h, "none": None, "rows": x.shape[0], "n": 3}

    for body in (alone, within):
        model = Net(body)
        graph = capture(model, (X,))
        assert [term.reduction for term in graph.loss_terms] == ["mean"]
        for samples in (1, 4):
            assert_equals_eager(graph, model, (X[:samples],))


def test_outputs_may_repeat_or_be_inputs() -> None:
    model = Net(lambda net, x: (x, [net.linear(x)] * 2, {"w": net.second.weight}))
    graph = capture(model, (X,), targets=Y, loss_fn=lambda out, y: mse(out[1][1], y))
    assert_equals_eager(graph, model, (X,), None, Y, lambda out, y: mse(out[1][1], y))


def test_list_of_samples_and_its_concatenation() -> None:
    def body(net: Net, x: torch.Tensor) -> Any:
        pieces = list(net.linear(x.reshape(x.shape[0], 3, 1).expand(-1, -1, 3)))
        return {"all": torch.cat(pieces), "pieces": pieces}

    def loss(out: Any, y: torch.Tensor) -> torch.Tensor:
        return out["all"].pow(2).mean()

    model = Net(body)
    graph = capture(model, (X,), targets=Y, loss_fn=loss)
    for samples in (1, 3):
        assert_equals_eager(graph, model, (X[:samples],), None, Y[:samples], loss)


def test_any_other_loop_over_samples_is_refused_by_line() -> None:
    with pytest.raises(CaptureError, match=r"loops over the samples.*test_capture.py:\d+"):
        capture(Net(lambda net, x: torch.stack([v * 2 for v in net.linear(x)])), (X,))


@pytest.mark.parametrize(
    "body",
    [
        lambda net, x: net.linear(x) / float(x.shape[0]),
        lambda net, x: net.linear(x).reshape(2, -1, 3).sum(0).mean(),
        lambda net, x: net.linear(x) if x.shape[0] > 3 else x,
    ],
)
def test_a_batch_that_is_taken_for_a_constant_is_refused(body: Any) -> None:
    with pytest.raises(CaptureError, match="works only for batches of some sizes"):
        capture(Net(body), (X,))


def test_the_line_that_fixes_the_batch_is_named() -> None:
    with pytest.raises(CaptureError, match=r"test_capture.py:\d+.*float\(x.shape\[0\]\)"):
        capture(Net(lambda net, x: net.linear(x) / float(x.shape[0])), (X,))


def test_shapes_that_depend_on_data_are_refused_with_the_module() -> None:
    class Positive(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x > 0].std()

    with pytest.raises(CaptureError, match="opaque"):
        capture(nn.Sequential(nn.Linear(3, 3), Positive()), (X,))


def test_an_error_of_the_model_is_told_with_its_line() -> None:
    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such luck")

    with pytest.raises(CaptureError, match=r"ValueError: no such luck.*test_capture.py:\d+"):
        capture(Net(body), (X,))


def test_missing_targets_are_told() -> None:
    with pytest.raises(CaptureError, match="fails while it is captured"):
        capture(Net(lambda net, x: net.linear(x)), (X,), loss_fn=F.mse_loss)


def test_wrong_models_losses_and_names_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"not an nn\.Module"):
        capture(lambda x: x, (X,))  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="trainable parameters"):
        capture(Net(lambda net, x: x), (X,), targets=Y, loss_fn=nn.Linear(3, 1))
    with pytest.raises(CaptureError, match="'nowhere'"):
        capture(Net(lambda net, x: net.linear(x)), (X,), opaque=["nowhere"])
    with pytest.raises(CaptureError, match="Bilinear"):
        capture(Net(lambda net, x: net.linear(x)), (X,), opaque=[nn.Bilinear])
    with pytest.raises(CaptureError, match="nowhere"):
        capture(Net(lambda net, x: net.linear(x)), (X,), per_sample_ops=["nowhere"])


def test_a_loss_module_brings_its_buffers_along() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    labels = torch.tensor([0, 1, 2, 2])
    model = Net(lambda net, x: net.linear(x))
    graph = capture(model, (X,), targets=labels, loss_fn=loss)
    held = graph.parameter_by_name["loss_fn.weight"]
    assert held.is_buffer
    assert not held.persistent
    assert_equals_eager(graph, model, (X,), None, labels, loss)


def test_several_rows_a_sample_stay_with_their_sample() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower, self.head = nn.Linear(3, 2), nn.Linear(8, 1)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.head(self.tower(images).reshape(-1, 8)).squeeze(-1)

    model = Images()
    images, y = torch.randn(16, 3), torch.randn(4)
    graph = capture(model, (images,), targets=y, loss_fn=mse, rows_per_sample={"images": 4})
    tower = graph.op_by_name["linear"]
    assert tower.output is not None
    assert tower.output.shape[0] == "4*b"
    assert all(op.crossable for op in graph.ops[:-1])
    assert_equals_eager(graph, model, (images[:8],), None, y[:2], mse)


def test_prep_ops_are_cheap_functions_of_the_inputs() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)
            self.register_buffer("table", torch.randn(16, 4))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            mask = (ids != 0).unsqueeze(-1)
            places = self.table[torch.arange(ids.shape[1])]
            return ((self.embed(ids) + places) * mask).sum(1)

    ids = torch.randint(0, 9, (4, 5))
    model = Masked()
    graph = capture(model, (ids,), targets=torch.randn(4, 4), loss_fn=mse)
    prep = {op.target.split(".")[1] for op in graph.ops if op.prep}
    assert prep == {"ne", "unsqueeze", "arange", "index"}
    assert_equals_eager(graph, model, (ids,), None, torch.randn(4, 4), mse)
    for op in graph.ops:
        if op.prep:
            inputs = {graph.op_by_name[n].prep for n in op.inputs if n in graph.op_by_name}
            assert inputs <= {True}


def test_module_paths_sources_and_keys() -> None:
    model = Net(lambda net, x: net.linear(net.linear(x)))
    graph = capture(model, (X,), targets=Y, loss_fn=mse)
    first, second = graph.ops[:2]
    assert (first.module, second.module) == ("linear", "linear")
    assert first.key != second.key
    assert "test_capture.py:" in first.source
    assert len({op.key for op in graph.ops}) == len(graph.ops)


def test_nothing_is_warned_about_a_plain_model() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = capture(Net(lambda net, x: net.linear(x)), (X,), targets=Y, loss_fn=mse)
    assert graph.warnings == ()


def test_an_output_that_is_no_structure_of_tensors_becomes_none_with_a_note() -> None:
    class Cache:
        def __init__(self, keys: torch.Tensor) -> None:
            self.keys = keys

    model = Net(lambda net, x: {"h": net.linear(x), "cache": Cache(x)})
    with pytest.warns(UserWarning, match="None in the outputs: Cache"):
        graph = capture(model, (X,), targets=Y, loss_fn=lambda out, y: mse(out["h"], y))
    _, output = run_program(graph, (X,), None, Y)
    assert output["cache"] is None
    assert output["h"].shape == (4, 3)
