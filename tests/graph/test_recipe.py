"""What one op does with arguments of given shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from graphpipe.graph.autocast import call_under_autocast
from graphpipe.graph.recipe import Recipe, TensorMeta, cooked, recipe_key

aten = torch.ops.aten


def meta(
    *shape: int, grad: bool = False, storage: int = 0, dtype: Any = torch.float32
) -> TensorMeta:
    empty = torch.empty(shape, device="meta", dtype=dtype)
    nbytes = empty.untyped_storage().nbytes()
    return TensorMeta(shape, tuple(empty.stride()), 0, dtype, grad, storage, nbytes)


def cook(target: Any, *args: Any, gradients: bool = True, **kwargs: Any) -> Recipe:
    leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda x: isinstance(x, TensorMeta))
    return cooked(target, spec, leaves, FakeTensorMode(), gradients=gradients)


def test_a_product_saves_its_inputs_and_costs_twice_as_much_backwards() -> None:
    recipe = cook(aten.mm.default, meta(2, 3, grad=True), meta(3, 4, grad=True, storage=1))
    assert recipe.outputs[0].meta.shape == (2, 4)
    assert recipe.outputs[0].meta.requires_grad
    assert [(s.kind, s.index, s.nbytes) for s in recipe.saves] == [
        ("input", 0, 24),
        ("input", 1, 48),
    ] or [(s.kind, s.index, s.nbytes) for s in recipe.saves] == [
        ("input", 1, 48),
        ("input", 0, 24),
    ]
    assert recipe.forward.flops == 2 * 2 * 3 * 4
    assert recipe.backward.flops == 2 * recipe.forward.flops


def test_without_gradients_nothing_is_saved_or_paid_backwards() -> None:
    recipe = cook(aten.mm.default, meta(2, 3, grad=True), meta(3, 4), gradients=False)
    assert not recipe.outputs[0].meta.requires_grad
    assert recipe.saves == ()
    assert recipe.backward.kernels == 0


@pytest.mark.parametrize("target", [aten.view.default, aten.as_strided.default])
def test_views_share_storage_and_cost_nothing(target: Any) -> None:
    extra = ([6],) if target is aten.view.default else ([6], [1])
    recipe = cook(target, meta(2, 3), *extra)
    assert recipe.outputs[0].alias == 0
    assert recipe.forward.kernels == 0


def test_in_place_ops_mutate_an_input_that_needs_a_gradient() -> None:
    recipe = cook(aten.add_.Tensor, meta(2, 3, grad=True), meta(2, 3, storage=1))
    assert recipe.mutates == (0,)
    assert recipe.outputs[0].alias == 0
    wrapped = cook(
        call_under_autocast, "cpu", torch.bfloat16, True, aten.relu_.default, meta(2, 3, grad=True)
    )
    assert wrapped.mutates == (0,)


def test_batch_norm_mutates_its_statistics_in_training_only() -> None:
    def norm(training: bool) -> Recipe:
        stats = [meta(3, storage=i) for i in range(1, 5)]
        return cook(aten.batch_norm.default, meta(2, 3), *stats, training, 0.1, 1e-5, False)

    assert norm(True).mutates == (3, 4)
    assert norm(False).mutates == ()


def test_the_op_keeps_memory_of_its_own() -> None:
    recipe = cook(aten.dropout.default, meta(4, 4, grad=True), 0.5, True)
    assert [(s.kind, s.nbytes) for s in recipe.saves] == [("inner", 64)]


def test_equal_ops_have_one_key_and_sharing_storage_makes_another() -> None:
    def key(*leaves: Any) -> object:
        spec = pytree.tree_structure((tuple(range(len(leaves))), {}))
        return recipe_key(aten.add.Tensor, spec, leaves, True)

    assert key(meta(2, storage=1), meta(2, storage=2)) == key(
        meta(2, storage=5), meta(2, storage=9)
    )
    assert key(meta(2, storage=1), meta(2, storage=2)) != key(
        meta(2, storage=1), meta(2, storage=1)
    )
    assert key(meta(2), 1) != key(meta(2), True)
    assert key(meta(2), {}) is None
