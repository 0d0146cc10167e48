"""A graph with split joins computes what the graph computed, and says what it consists of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphpipe.cost.analytic import estimate
from graphpipe.errors import GraphError
from graphpipe.graph.capture import capture
from graphpipe.graph.model_graph import JoinSplit, ModelGraph, ParamSlice
from graphpipe.graph.split_joins import grouped, split_joins, splittable
from graphpipe.programs.planning import capture_job
from graphpipe.zoo.load import load_job
from tests.graph.joined import Joined, batch, captured, gradients


def kinds(graph: ModelGraph) -> list[str]:
    return [op.target for op in graph.ops]


def assert_same(model: nn.Module) -> ModelGraph:
    """Splits the model's graph; loss and all gradients stay."""
    graph = captured(model.double())
    split = split_joins(graph)
    (loss, want), (other, got) = gradients(graph), gradients(split)
    torch.testing.assert_close(other, loss, rtol=1e-12, atol=1e-12)
    assert got.keys() == want.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=1e-11, atol=1e-12, msg=name)
    return split


def test_a_linear_over_a_concatenation_becomes_partial_linears_and_a_sum() -> None:
    split = assert_same(Joined())
    assert "aten.cat.default" not in kinds(split)
    assert kinds(split).count("graphpipe.partial_linear") == 3
    assert kinds(split).count("graphpipe.join_sum") == 1
    assert split.joins == (JoinSplit(parameter="join.weight", widths=(4, 3, 5)),)
    names = [item.name for item in split.parameters if item.canonical == "join.weight"]
    assert names == ["join.weight[:, 0:4]", "join.weight[:, 4:7]", "join.weight[:, 7:12]"]
    part = split.parameter_by_name[names[1]]
    assert part.shape == (8, 3)
    assert part.slice == ParamSlice(of="join.weight", dim=1, start=4, length=3, full_shape=(8, 12))
    assert sum(item.numel for item in split.parameters) == sum(
        item.numel for item in captured(Joined()).parameters
    )


def test_the_sum_stands_for_the_linear_and_adds_the_bias_once() -> None:
    graph = captured(Joined())
    split = split_joins(graph)
    old = next(op for op in graph.ops if op.module == "join")
    new = split.op_by_name[old.name]
    assert (new.key, new.output, new.module) == (old.key, old.output, old.module)
    assert new.parameters == ("join.bias",)
    partials = [op for op in split.ops if op.target == "graphpipe.partial_linear"]
    assert new.inputs == tuple(op.name for op in sorted(partials, key=lambda op: op.key))
    assert not any("join.bias" in op.parameters for op in partials)
    # The work of the linear is divided, not repeated.
    assert [op.forward.flops for op in partials] == ["64*b", "48*b", "80*b"]
    assert len({op.key for op in split.ops}) == len(split.ops)


def test_without_a_bias() -> None:
    split = assert_same(Joined(bias=False))
    assert next(op for op in split.ops if op.target == "graphpipe.join_sum").parameters == ()


BETWEEN: dict[str, tuple[Callable[[torch.Tensor, Joined], torch.Tensor], int]] = {
    "activation": (lambda x, _: x.tanh(), 3),
    "activation in place": (lambda x, _: functional.relu_(x), 3),
    "several": (lambda x, _: functional.leaky_relu(x * 2.0 + 1.0), 9),
    "itself times its sigmoid": (lambda x, _: x * x.sigmoid(), 6),
    "a learned factor": (lambda x, m: x * m.factor, 3),
    "a factor for all features": (lambda x, m: x * m.factor.reshape(1, 1), 3),
    "a copy": (lambda x, _: x.contiguous().clone(), 3),
    "dropout that is off": (lambda x, _: functional.dropout(x, 0.5, False), 0),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_element_wise_ops_work_on_the_pieces(name: str) -> None:
    between, pieces = BETWEEN[name]
    split = assert_same(Joined(between))
    found = [op for op in split.ops if "_piece" in op.name]
    assert len(found) >= pieces
    assert not any(op.target == "aten.cat.default" for op in split.ops)


def test_branches_that_end_in_place() -> None:
    assert_same(Joined(inplace=True))


def test_a_cast_and_a_join_in_another_precision() -> None:
    class Casts(Joined):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            joined = torch.cat([branch(x) for branch in self.branches], -1)
            with torch.autocast("cpu", torch.bfloat16):
                out = self.join(joined)
            found: torch.Tensor = self.head(out.float())
            return found

    graph = captured(Casts().float())
    split = split_joins(graph)
    partial = next(op for op in split.ops if op.target == "graphpipe.partial_linear")
    total = next(op for op in split.ops if op.target == "graphpipe.join_sum")
    assert partial.output is not None
    assert partial.output.dtype == "float32"
    assert total.output is not None
    assert total.output.dtype == "bfloat16"
    (loss, want), (other, got) = gradients(graph), gradients(split)
    torch.testing.assert_close(other, loss, rtol=1e-2, atol=1e-2)
    for key, value in got.items():
        torch.testing.assert_close(value, want[key], rtol=0.05, atol=0.02, msg=key)


def test_a_concatenation_that_something_else_reads_stays() -> None:
    class Two(Joined):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            joined = torch.cat([branch(x) for branch in self.branches], -1)
            out: torch.Tensor = self.head(self.join(joined).tanh()) + joined.mean(-1, True)
            return out

    split = assert_same(Two())
    assert kinds(split).count("aten.cat.default") == 1


def test_two_linears_over_one_concatenation() -> None:
    class Twice(Joined):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(12, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            joined = torch.cat([branch(x) for branch in self.branches], -1).relu()
            out: torch.Tensor = self.head(self.join(joined) * self.gate(joined).sigmoid())
            return out

    split = assert_same(Twice())
    assert [item.parameter for item in split.joins] == ["join.weight", "gate.weight"]
    assert kinds(split).count("graphpipe.partial_linear") == 6
    # Both read the same pieces.
    assert sum("relu" in op.name and "_piece" in op.name for op in split.ops) == 3
    some = split_joins(captured(Twice().double()), split.joins[:1])
    assert [item.parameter for item in some.joins] == ["join.weight"]


def test_a_join_of_joins() -> None:
    class Nested(Joined):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(12, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [branch(x) for branch in self.branches]
            inner = functional.relu_(self.join(torch.cat(parts, -1)))
            out: torch.Tensor = self.last(torch.cat([inner, parts[0]], -1))
            return out

    assert [item.widths for item in assert_same(Nested()).joins] == [(4, 3, 5), (8, 4)]


def test_matrix_products_with_a_weight_that_lies_the_other_way() -> None:
    class Product(Joined):
        def __init__(self, add: bool) -> None:
            super().__init__()
            self.add = add
            self.matrix = nn.Parameter(torch.randn(12, 8))
            self.offset = nn.Parameter(torch.randn(8))
            del self.join

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            joined = torch.cat([branch(x) for branch in self.branches], -1)
            if self.add:
                out = torch.addmm(self.offset, joined, self.matrix)
            else:
                out = joined @ self.matrix + self.offset
            found: torch.Tensor = self.head(out)
            return found

    for add in (True, False):
        split = assert_same(Product(add))
        part = split.parameter_by_name["matrix[4:7]"].slice
        assert part is not None
        assert part.dim == 0
        assert part.full_shape == (12, 8)


def test_thin_pieces_are_put_together() -> None:
    assert grouped((1, 1, 100, 100)) == (102, 100)
    assert grouped((100, 100, 1)) == (100, 101)
    assert grouped((4096, *[64] * 24)) == (4096, 384, 384, 384, 384)
    split = assert_same(Joined(widths=(1, 1, 40, 20)))
    assert split.joins[0].widths == (42, 20)
    assert kinds(split).count("aten.cat.default") == 1


def test_what_cannot_be_split_says_why() -> None:
    class Tied(Joined):
        def __init__(self) -> None:
            super().__init__()
            self.again = nn.Linear(12, 8)
            self.again.weight = self.join.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            joined = torch.cat([branch(x) for branch in self.branches], -1)
            out: torch.Tensor = self.head(self.join(joined) + self.again(joined))
            return out

    class Penalised(Joined):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.join.weight.sum() * 1e-3

    class Computed(Joined):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            joined = torch.cat([branch(x) for branch in self.branches], -1)
            out: torch.Tensor = self.head(functional.linear(joined, self.join.weight * 2.0))
            return out

    for model, reason in (
        (Tied(), "is tied to again.weight"),
        (Penalised(), "is read 2 times"),
        (Computed(), "its weight is computed"),
    ):
        graph = captured(model)
        found = splittable(graph)
        assert not found.joins
        assert reason in found.refused[0][1]
        with pytest.raises(GraphError, match=reason):
            split_joins(graph)
    with pytest.raises(GraphError, match="tied"):
        split_joins(captured(Tied()), [JoinSplit(parameter="join.weight", widths=(4, 3, 5))])


@pytest.mark.parametrize(
    "between",
    [
        lambda x, _: functional.layer_norm(x, x.shape[-1:]),
        lambda x, _: x.softmax(-1),
        lambda x, _: x + torch.linspace(0.0, 1.0, 12),
        lambda x, _: x.flip(-1),
        lambda x, _: functional.alpha_dropout(x, 0.5, True),
        lambda x, _: x.unsqueeze(1).squeeze(1),
    ],
)
def test_what_mixes_or_tells_features_apart_is_left_alone(
    between: Callable[[torch.Tensor, Joined], torch.Tensor],
) -> None:
    graph = captured(Joined(between))
    assert not splittable(graph).joins
    with pytest.raises(GraphError, match="no join to split"):
        split_joins(graph)


def test_a_concatenation_along_the_samples_or_the_sequence_is_no_join() -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.join = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.join(torch.cat([x[:, None], x[:, None]], 1)).sum(1)
            return out

    assert not splittable(captured(Sequence().double())).joins


def test_a_branch_that_is_changed_in_place_later_is_refused() -> None:
    class Later(Joined):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [branch(x) for branch in self.branches]
            out = self.join(torch.cat(parts, -1))
            parts[0].add_(1.0)
            found: torch.Tensor = self.head(out) + parts[0].sum(-1, True)
            return found

    found = splittable(captured(Later()))
    assert "changed in place later" in found.refused[0][1]


def test_the_same_joins_are_split_in_every_variant() -> None:
    model = Joined(lambda x, m: functional.dropout(x, 0.3, m.training)).double()
    split = split_joins(captured(model))
    other = split_joins(captured(model, training=False), split.joins)
    assert other.joins == split.joins
    assert {op.key for op in other.ops} <= {op.key for op in split.ops}
    with pytest.raises(GraphError, match="are not those of the concatenation"):
        split_joins(captured(model), [JoinSplit(parameter="join.weight", widths=(5, 7))])
    with pytest.raises(GraphError, match=r"The join of head.weight cannot be split"):
        split_joins(captured(model), [JoinSplit(parameter="head.weight", widths=(4, 4))])


def test_a_dropout_of_the_pieces_is_seeded_as_the_whole() -> None:
    split = split_joins(captured(Joined(lambda x, _: functional.dropout(x, 0.5, True))))
    pieces = [op for op in split.ops if op.target == "graphpipe.dropout_of_piece"]
    assert len(pieces) == 3
    assert all(op.random for op in pieces)
    assert {op.random_key for op in pieces} == {"between:aten.dropout.default#0"} or len(
        {op.random_key for op in pieces}
    ) == 1
    assert len({op.key for op in pieces}) == 3


def test_a_graph_without_a_program_is_refused() -> None:
    graph = ModelGraph.from_json(captured(Joined()).to_json())
    with pytest.raises(GraphError, match="has none"):
        split_joins(graph)


def test_the_rewritten_graph_is_a_file_and_has_costs_like_any_other() -> None:
    split = split_joins(captured(Joined().float()))
    again = ModelGraph.from_json(split.to_json())
    assert again.to_json() == split.to_json()
    assert again.joins == split.joins
    assert again.fingerprint == split.fingerprint
    costs = estimate(split, "v100-16gb", precision="bf16-mixed")
    place = costs.ops.index(next(o.name for o in split.ops if "partial" in o.target))
    assert costs.output_bytes[place].tolist() == [0.0, 32.0]  # fp32 under autocast
    total = costs.ops.index(next(o.name for o in split.ops if "join_sum" in o.target))
    assert costs.output_bytes[total].tolist() == [0.0, 16.0]


@pytest.mark.parametrize(
    ("name", "weight", "slices"),
    [
        ("zoo:candle-uno-tiny", "joint.0.0.weight", 5),
        pytest.param("zoo:dlrm-tiny", "top.0.weight", None, marks=pytest.mark.long),
        pytest.param("zoo:mmt-tiny", "join.weight", 4, marks=pytest.mark.long),
    ],
)
def test_models_of_the_zoo(name: str, weight: str, slices: int | None) -> None:
    job = load_job(name)
    graph = capture_job(job)
    split = split_joins(graph)
    assert [item.parameter for item in split.joins] == [weight]
    if slices is not None:
        assert len(split.joins[0].widths) == slices
    whole = graph.parameter_by_name[weight]
    assert sum(split.joins[0].widths) == whole.shape[1]
    same = {op.name: op for op in graph.ops}
    for op in split.ops:
        if op.name in same and op.target == same[op.name].target:
            assert (op.forward, op.backward, op.output) == (
                same[op.name].forward, same[op.name].backward, same[op.name].output,
            )  # fmt: skip


def test_two_towers_of_the_read_me() -> None:
    class TwoTowers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image = nn.Linear(6, 8)
            self.text = nn.Linear(6, 8)
            self.join = nn.Linear(16, 2)

        def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            both = torch.cat([self.image(image).relu(), self.text(text).relu()], 1)
            out: torch.Tensor = self.join(both)
            return out

    x, target = batch()
    model = TwoTowers().double()
    graph = capture(model, (x, x), targets=target, loss_fn=functional.mse_loss)
    assert split_joins(graph).joins == (JoinSplit(parameter="join.weight", widths=(8, 8)),)
