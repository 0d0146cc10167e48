"""Boolean indexing that a reduction follows, written with masks.

``loss[mask].mean()`` makes a tensor whose size depends on data, which cannot be cut into
micro-batches. Where all that becomes of it is a sum or a mean, the same value comes from the whole
tensor: what is masked out counts as zero, and the mean divides by how many are left. The divisor
is a count of its own, so the mean is exact however the samples lie in micro-batches.

Every row that is masked out is replaced by ones where it is picked and by zeros where it is
summed. The gradient of a replaced value is zero whatever was computed with it, so an infinity
or NaN in a row that nobody wanted stays without effect, as with boolean indexing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from graphpipe.graph.normalise import size_refused

aten = torch.ops.aten

_COPIES = ("to", "_to_copy", "clone", "contiguous", "detach", "alias", "float", "type_as")
_LOSSES = {
    "mse_loss": 2,
    "l1_loss": 2,
    "smooth_l1_loss": 2,
    "huber_loss": 2,
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
}
"""Losses that go element by element, and which argument is the reduction."""


@dataclass(frozen=True)
class _Picked:
    """A value of which ``mask`` picks some rows: the first dimensions are the mask's."""

    whole: fx.Node
    mask: fx.Node


def write_with_masks(graph: fx.Graph) -> None:
    """Rewrites what it can in an exported graph, in place.

    Args:
        graph: Of an export, with fake values in ``meta["val"]``.

    Raises:
        CaptureError: if more becomes of what a mask picks than a sum or a mean.
    """
    _Masks(graph).run()


class _Masks:
    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._picked: dict[fx.Node, _Picked] = {}
        self._lists: dict[fx.Node, list[_Picked]] = {}
        self._rewritten: set[fx.Node] = set()

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.op == "call_function":
                self._visit(node)
        if self._picked:
            self._erase_dead()

    def _visit(self, node: fx.Node) -> None:
        name = getattr(node.target, "_opname", getattr(node.target, "__name__", ""))
        with self._graph.inserting_before(node):
            if name in ("index", "masked_select"):
                self._pick(node)
            elif name == "getitem" and node.args[0] in self._lists:
                source: Any
                place: Any
                source, place = node.args
                self._picked[node] = self._lists[source][place]
            elif any(source in self._picked for source in node.all_input_nodes):
                self._follow(node, name)

    def _pick(self, node: fx.Node) -> None:
        whole: Any = node.args[0]
        mask: Any = node.args[1]
        if isinstance(mask, (tuple, list)):
            if len(mask) != 1:
                return
            mask = mask[0]
        if not isinstance(mask, fx.Node) or whole in self._picked or mask in self._picked:
            return
        value, chosen = whole.meta["val"], mask.meta["val"]
        depth = chosen.dim()
        if chosen.dtype != torch.bool or not depth or value.shape[:depth] != chosen.shape:
            return
        self._picked[node] = _Picked(self._where(whole, mask, 1, node), mask)

    def _follow(self, node: fx.Node, name: str) -> None:
        found = [self._picked[n] for n in node.all_input_nodes if n in self._picked]
        if not self._aligned(node, found):
            return
        if name in ("cross_entropy_loss", "nll_loss", "nll_loss_nd"):
            self._class_loss(node)
        elif name in _LOSSES:
            self._element_loss(node, _LOSSES[name])
        elif name in ("sum", "mean") and self._everything(node):
            self._replace(node, self._reduced(found[0], name, node))
        elif name == "broadcast_tensors":
            tensors: Any = node.args[0]
            self._lists[node] = [self._picked[source] for source in tensors]
        elif torch.Tag.pointwise in getattr(node.target, "tags", ()) or name in _COPIES:
            self._apply(node, node.args)
        elif name in ("softmax", "log_softmax", "sum", "mean") and len(node.args) > 1:
            self._along(node, found[0])

    def _aligned(self, node: fx.Node, found: list[_Picked]) -> bool:
        """Whether all tensors are picked by one mask, and have as many dimensions."""
        first = found[0]
        if any(not _same(item.mask, first.mask) for item in found):
            return False
        dims = {_dim(item.whole) for item in found}
        others = [n for n in node.all_input_nodes if n not in self._picked]
        if getattr(node.target, "_opname", "") in ("cross_entropy_loss", "nll_loss", "nll_loss_nd"):
            return all(_dim(other) == 1 for other in others)  # the weights of the classes
        return len(dims) == 1 and all(_dim(other) == 0 for other in others)

    def _apply(self, node: fx.Node, args: Any) -> None:
        """The same op on the whole tensors."""
        whole = self._call(node.target, self._wholes(args), node, dict(node.kwargs))
        self._picked[node] = _Picked(whole, self._mask(node))

    def _along(self, node: fx.Node, picked: _Picked) -> None:
        """An op along other dimensions than the rows."""
        shift = _dim(picked.mask) - 1
        rows = _dim(picked.whole) - shift
        given = node.args[1]
        listed = list(given) if isinstance(given, (tuple, list)) else [given]
        if not listed or not all(isinstance(d, int) for d in listed):
            return
        dims = [d % rows for d in listed]  # type: ignore[operator]
        if 0 in dims:
            return
        moved = [d + shift for d in dims]
        new: Any = moved if isinstance(given, (tuple, list)) else moved[0]
        self._apply(node, (node.args[0], new, *node.args[2:]))

    def _class_loss(self, node: fx.Node) -> None:
        """Class indices that are masked out become the index that is ignored."""
        schema = node.target._schema  # type: ignore[union-attr]
        full = [node.kwargs.get(a.name, a.default_value) for a in schema.arguments]
        full[: len(node.args)] = node.args
        scores, labels = full[0], full[1]
        if scores not in self._picked or labels not in self._picked:
            return
        if labels.meta["val"].dtype.is_floating_point:
            return
        mask = self._picked[scores].mask
        depth, ignored = _dim(mask), full[4]
        flat = [self._picked[item].whole for item in (scores, labels)]
        chosen = mask
        if depth > 1:
            flat = [self._call(aten.flatten.using_ints, (x, 0, depth - 1), node) for x in flat]
            chosen = self._call(aten.flatten.using_ints, (mask, 0, depth - 1), node)
        known = self._where(flat[1], chosen, ignored, node)
        args = (flat[0], known, *full[2:])
        result = self._call(node.target, args, node)
        if full[3] == 0:
            self._picked[node] = _Picked(result, chosen)
        else:
            self._replace(node, result)

    def _element_loss(self, node: fx.Node, place: int) -> None:
        if any(item is not None and item not in self._picked for item in node.args[2:place]):
            return
        args = list(node.args)
        reduction = args[place] if len(args) > place else node.kwargs.get("reduction", 1)
        kwargs = {key: value for key, value in node.kwargs.items() if key != "reduction"}
        if len(args) > place:
            args[place] = 0
        else:
            kwargs["reduction"] = 0
        whole = self._call(node.target, self._wholes(args), node, kwargs)
        picked = _Picked(whole, self._mask(node))
        if reduction == 0:
            self._picked[node] = picked
        else:
            self._replace(node, self._reduced(picked, "mean" if reduction == 1 else "sum", node))

    def _everything(self, node: fx.Node) -> bool:
        return len(node.args) == 1 and not node.kwargs

    def _reduced(self, picked: _Picked, name: str, node: fx.Node) -> fx.Node:
        """The sum of what is picked, or its mean as a sum over a count."""
        kept = self._where(picked.whole, picked.mask, 0, node)
        total = self._call(aten.sum.default, (kept,), node)
        if name == "sum":
            return total
        count = self._call(aten.sum.default, (picked.mask,), node)
        inside = 1
        for size in picked.whole.meta["val"].shape[_dim(picked.mask) :]:
            inside *= int(size)
        if inside != 1:
            count = self._call(aten.mul.Tensor, (count, inside), node)
        return self._call(aten.div.Tensor, (total, count), node)

    def _where(self, value: fx.Node, mask: fx.Node, other: int, near: fx.Node) -> fx.Node:
        for _ in range(_dim(value) - _dim(mask)):
            mask = self._call(aten.unsqueeze.default, (mask, -1), near)
        return self._call(aten.where.ScalarOther, (mask, value, other), near)

    def _mask(self, node: fx.Node) -> fx.Node:
        return next(self._picked[n].mask for n in node.all_input_nodes if n in self._picked)

    def _wholes(self, args: Any) -> Any:
        return map_arg(args, lambda n: self._picked[n].whole if n in self._picked else n)

    def _call(
        self, target: Any, args: Any, near: fx.Node, kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        new = self._graph.call_function(target, tuple(args), kwargs or {})
        new.meta.update(near.meta)
        values = map_arg((new.args, new.kwargs), lambda n: n.meta["val"])
        new.meta["val"] = target(*values[0], **values[1])
        return new

    def _replace(self, node: fx.Node, new: fx.Node) -> None:
        node.replace_all_uses_with(new)
        self._rewritten.add(node)

    def _erase_dead(self) -> None:
        """Removes what was rewritten, and the checks of the sizes that are gone with it.

        Raises:
            CaptureError: if something else still reads a picked value.
        """
        related: set[fx.Node] = {*self._picked, *self._lists, *self._rewritten}
        sizes: set[fx.Node] = set()
        for node in self._graph.nodes:
            if any(n in related or n in sizes for n in node.all_input_nodes) and _about_size(node):
                sizes.add(node)
        for node in reversed(list(self._graph.nodes)):
            if node in sizes and not node.users:
                self._graph.erase_node(node)
            elif node in related:
                if node.users:
                    raise size_refused(node, "A size depends on the data")
                self._graph.erase_node(node)


def _about_size(node: fx.Node) -> bool:
    """Whether a node only reads or checks a size."""
    value = node.meta.get("val")
    return isinstance(value, (torch.SymInt, torch.SymBool)) or value is None


def _dim(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.dim()) if isinstance(value, torch.Tensor) else 0


def _same(left: Any, right: Any) -> bool:
    """Whether two values come from the same computation."""
    if left is right:
        return True
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return type(left) is type(right) and bool(left == right)
    if left.op != "call_function" or left.target is not right.target:
        return False
    if torch.Tag.pointwise not in getattr(left.target, "tags", ()):
        return False
    one = [*left.args, *left.kwargs.items()]
    two = [*right.args, *right.kwargs.items()]
    return len(one) == len(two) and all(_same(a, b) for a, b in zip(one, two, strict=True))
