"""Takes the loss apart into addends, each a sink of the graph with a reduction of its own.

Additions are peeled off from the total. Scalings above an addition are distributed over its
addends (``0.1 * (a + b)`` becomes ``0.1 * a`` and ``0.1 * b``), so that a balance loss of an
early layer ends in that layer's stage. A mean over the tokens that count becomes a sum and
a count, which is exact however the tokens lie in the micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from graphpipe.errors import CaptureError
from graphpipe.graph.autocast import operator_of
from graphpipe.graph.dataflow import DataFlow
from graphpipe.graph.flow import FREE, Flow, Kind

aten = torch.ops.aten

Reduction = Literal["mean", "sum", "sum_count", "batch_free", "coupled"]
REDUCTIONS = ("mean", "sum", "sum_count", "batch_free", "coupled")


@dataclass(eq=False)
class Term:
    """One addend of the loss.

    Attributes:
        node: The scalar.
        reduction: See :class:`graphpipe.graph.model_graph.LossTerm`.
        count: The node of the count.
        offset: Added to the sum of the counts.
        minimum: Least value of the divisor.
        sign: 1.0 or -1.0.
    """

    node: fx.Node
    reduction: Reduction | None = None
    count: fx.Node | None = None
    offset: float = 0.0
    minimum: float | None = None
    sign: float = 1.0


@dataclass(frozen=True)
class _Scale:
    """A linear op between an addend and the total, to be applied to the addend alone.

    Either ``node`` with the addend in the place of argument ``position``, or a factor.
    """

    node: fx.Node
    position: int = 0
    factor: float | None = None


def split_loss(
    graph: fx.Graph,
    losses: list[fx.Node],
    names: tuple[str, ...],
    flow: DataFlow,
    reduction: str | Mapping[str, str] | None,
) -> list[Term]:
    """The terms of the loss; adds nodes to ``graph`` where scalings are distributed.

    Args:
        graph: A normalised graph.
        losses: The scalars that the loss function returned.
        names: What each is called (``sum`` and ``count`` for that pair).
        flow: The data flow of ``graph``.
        reduction: What the user declares, for all terms or by name.

    Raises:
        CaptureError: if a declared reduction is unknown or contradicts the data flow.
    """
    if names == ("sum", "count"):
        return [Term(losses[0], "sum_count", losses[1])]
    terms: list[Term] = []
    for node, name in zip(losses, names, strict=True):
        declared = reduction.get(name) if isinstance(reduction, Mapping) else reduction
        _check_declared(declared, name)
        for addend, scales, sign in _addends(node, flow):
            terms.append(_term(graph, addend, scales, sign, flow, declared))
    return terms


def _check_declared(declared: str | None, name: str) -> None:
    if declared is not None and declared not in REDUCTIONS:
        raise CaptureError(
            "An unknown reduction is declared",
            where=f"reduction{f' of {name!r}' if name else ''}",
            expected="one of " + ", ".join(REDUCTIONS),
            got=repr(declared),
        )


def _addends(root: fx.Node, flow: DataFlow) -> list[tuple[fx.Node, tuple[_Scale, ...], float]]:
    """The scalars that add up to ``root``, with the scalings to apply (innermost first)."""
    result: list[tuple[fx.Node, tuple[_Scale, ...], float]] = []
    stack: list[tuple[fx.Node, tuple[_Scale, ...], float]] = [(root, (), 1.0)]
    while stack:
        node, scales, sign = stack.pop()
        parts = _parts(node, flow)
        if parts is None:
            result.append((node, scales, sign))
            continue
        for part, scale, factor in reversed(parts):
            wrapped = scales if scale is None else (scale, *scales)
            stack.append((part, wrapped, sign * factor))
    return result


def _parts(node: fx.Node, flow: DataFlow) -> list[tuple[fx.Node, _Scale | None, float]] | None:
    """One step of peeling: the addends of ``node``, or None if it is one itself."""
    if node.op != "call_function":
        return None
    name = getattr(node.target, "_opname", "")
    args = node.args
    if (
        name in ("add", "sub", "add_", "sub_")
        and node.kwargs.get("alpha", 1) == 1
        and len(args) == 2
    ):
        left, right = args
        if name.endswith("_") and len(node.users) > 1:
            return None
        sign = -1.0 if name.startswith("sub") else 1.0
        if _scalar(left, flow) and _scalar(right, flow):
            return [(left, None, 1.0), (right, None, sign)]  # type: ignore[list-item]
        # A number that is added: zero (`total = 0.0` to start with) is no term of its own.
        if _scalar(left, flow) and right == 0:
            return [(left, None, 1.0)]  # type: ignore[list-item]
        return None
    if name == "neg" and _scalar(args[0], flow):
        return [(args[0], None, -1.0)]  # type: ignore[list-item]
    if name in ("mul", "div") and len(args) == 2 and not node.kwargs:
        for position in (0, 1) if name == "mul" else (0,):
            inner, other = args[position], args[1 - position]
            if _splits(inner, flow) and _constant(other, flow):
                return [(inner, _Scale(node, position), 1.0)]  # type: ignore[list-item]
        return None
    if name in ("sum", "mean") and len(args) == 1 and not node.kwargs:
        return _stacked(node, flow)
    copies = ("to", "clone", "contiguous", "view", "reshape", "squeeze", "alias")
    if name in copies and args and _splits(args[0], flow) and _scalar(node, flow):
        return [(args[0], _Scale(node, 0), 1.0)]  # type: ignore[list-item]
    return None


def _stacked(node: fx.Node, flow: DataFlow) -> list[tuple[fx.Node, _Scale | None, float]] | None:
    """``torch.stack(losses).sum()`` or ``.mean()``: every one of the stacked scalars."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or getattr(source.target, "_opname", "") not in (
        "stack",
        "cat",
    ):
        return None
    parts = source.args[0]
    assert isinstance(parts, (tuple, list))
    if not all(_scalar(part, flow) for part in parts):
        return None
    mean = getattr(node.target, "_opname", "") == "mean"
    scale = _Scale(node, factor=1.0 / len(parts)) if mean else None
    return [(part, scale, 1.0) for part in parts]  # type: ignore[misc]


def _splits(node: Any, flow: DataFlow) -> bool:
    """Whether there is an addition (or a countable mean) somewhere below the linear ops."""
    return (
        isinstance(node, fx.Node)
        and _scalar(node, flow)
        and (
            _parts(node, flow) is not None
            or _is_ratio(node, flow)
            or _counted(node, flow) is not None
        )
    )


def _scalar(node: Any, flow: DataFlow) -> bool:
    """Whether a value is a tensor of one element."""
    if not isinstance(node, fx.Node) or node not in flow.dims:
        return False
    return all(size == (0, 1) for size in flow.dims[node])


def _constant(value: Any, flow: DataFlow) -> bool:
    """Whether a factor is a number or does not depend on the samples."""
    if isinstance(value, (int, float)):
        return True
    return _scalar(value, flow) and flow.flows[value] == FREE


def _term(
    graph: fx.Graph,
    addend: fx.Node,
    scales: tuple[_Scale, ...],
    sign: float,
    flow: DataFlow,
    declared: str | None,
) -> Term:
    found = flow.flows[addend]
    inferred = _inferred(found)
    if declared is None:
        term = _as_count(graph, addend, flow)
        if term is None:
            term = Term(addend, inferred)
    else:
        if {declared, inferred} == {"mean", "sum"}:
            raise CaptureError(
                "The declared reduction contradicts what the loss computes",
                where=addend.name,
                expected=f"reduction={inferred!r}, as its data flow shows",
                got=repr(declared),
            )
        term = _as_declared(graph, addend, flow, declared)
    term.sign = sign
    if term.node.op != "call_function":
        # A parameter or an input is no op, and a term must be one.
        leaves = [node for node in graph.nodes if node.op == "placeholder"]
        with graph.inserting_after(addend if addend.op == "get_attr" else leaves[-1]):
            term.node = graph.call_function(aten.alias.default, (addend,))
    if flow.dims[addend]:
        with graph.inserting_after(term.node):
            scalar = graph.call_function(aten.reshape.default, (term.node, []))
        scalar.meta["origin"] = term.node.meta.get("origin")
        term.node = scalar
    for scale in scales:
        term.node = _scaled(graph, term.node, scale)
    return term


def _as_declared(graph: fx.Graph, addend: fx.Node, flow: DataFlow, declared: str) -> Term:
    """The term with the reduction that the user wants."""
    if declared != "sum_count":
        return Term(addend, declared)  # type: ignore[arg-type]
    term = _as_count(graph, addend, flow)
    if term is None:
        raise CaptureError(
            "A loss is declared as a sum over a count, but it is no such quotient",
            where=addend.name,
            expected="sum / count, or a loss function that returns the pair (sum, count)",
            got=f"a scalar that adds up as {_inferred(flow.flows[addend])!r}",
        )
    return term


def _inferred(flow: Flow) -> Reduction:
    if flow.kind is Kind.SUM and flow.power == 0:
        return "sum"
    if flow.kind is Kind.SUM and flow.power == -1:
        return "mean"
    if flow == FREE:
        return "batch_free"
    return "coupled"


def _scaled(graph: fx.Graph, node: fx.Node, scale: _Scale) -> fx.Node:
    """The linear op of ``scale`` applied to ``node`` instead."""
    old = scale.node
    if scale.factor is not None:
        with graph.inserting_after(max([old, node], key=_position(graph))):
            new = graph.call_function(aten.mul.Tensor, (node, scale.factor))
        new.meta.update(old.meta)
        return new
    args = tuple(node if i == scale.position else arg for i, arg in enumerate(old.args))
    last = max([old, *_nodes(args)], key=_position(graph))
    with graph.inserting_after(last):
        new = graph.create_node(old.op, old.target, args, dict(old.kwargs), old.name)
    new.meta.update(old.meta)
    return new


def _nodes(args: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(args, found.append)
    return found


def _position(graph: fx.Graph) -> Any:
    order = {node: i for i, node in enumerate(graph.nodes)}
    return order.__getitem__


def _as_count(graph: fx.Graph, node: fx.Node, flow: DataFlow) -> Term | None:
    """A quotient of sums, or a mean over counted rows, as a sum and a count."""
    if _is_ratio(node, flow):
        numerator, denominator = node.args
        count, offset, minimum = _divisor(denominator, flow)
        return Term(numerator, "sum_count", count, offset, minimum)  # type: ignore[arg-type]
    counted = _counted(node, flow)
    if counted is None:
        return None
    return _sum_and_count(graph, node, counted)


def _is_ratio(node: fx.Node, flow: DataFlow) -> bool:
    """sum / count, where the count gets no gradient."""
    if node.op != "call_function" or getattr(node.target, "_opname", "") != "div":
        return False
    if len(node.args) != 2 or node.kwargs.get("rounding_mode") is not None:
        return False
    numerator, denominator = node.args
    if not isinstance(denominator, fx.Node) or not _scalar(denominator, flow):
        return False
    if not _scalar(numerator, flow) or flow.flows[numerator] != Flow(Kind.SUM):  # type: ignore[index]
        return False
    count, _, _ = _divisor(denominator, flow)
    return count is not None and count not in flow.gradients


def _divisor(node: Any, flow: DataFlow) -> tuple[fx.Node | None, float, float | None]:
    """(count, offset, minimum) of a denominator: count, count + eps, clamp(count, min)."""
    offset, minimum = 0.0, None
    while isinstance(node, fx.Node) and node in flow.flows:
        if flow.flows[node] == Flow(Kind.SUM):
            return node, offset, minimum
        if node.op != "call_function" or not node.args:
            break
        name, args, kwargs = node.target._opname, node.args, node.kwargs  # type: ignore[union-attr]
        if name == "add" and len(args) == 2 and isinstance(args[1], (int, float)):
            if kwargs.get("alpha", 1) != 1 or minimum is not None:
                break
            offset += args[1]
        elif name in ("clamp", "clamp_min", "maximum"):
            least = args[1] if len(args) > 1 else kwargs.get("min")
            most = args[2] if len(args) > 2 else kwargs.get("max")
            if not isinstance(least, (int, float)) or most is not None or offset or minimum:
                break
            minimum = float(least)
        elif name not in ("to", "clone", "detach", "view", "reshape", "squeeze"):
            break
        node = args[0]
    return None, 0.0, None


@dataclass(frozen=True)
class _Counted:
    """A class loss that averages over the targets that are not ignored."""

    target: Any
    prefix: tuple[Any, ...]
    args: tuple[Any, ...]
    smoothing: float


def _counted(node: fx.Node, flow: DataFlow) -> _Counted | None:
    """cross_entropy or nll_loss with class indices, averaged, row by row per sample."""
    if node.op != "call_function":
        return None
    target, args, kwargs = operator_of(node)
    name = getattr(target, "_opname", "")
    if name not in ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"):
        return None
    if flow.flows.get(node) != Flow(Kind.SUM, power=-1):
        return None
    full = [kwargs.get(a.name, a.default_value) for a in target._schema.arguments]
    full[: len(args)] = args
    if full[3] != 1:
        return None
    labels = full[1]
    if not isinstance(labels, fx.Node) or flow.dtypes[labels].startswith(("float", "bfloat")):
        return None
    prefix = node.args[: len(node.args) - len(args)]
    smoothing = float(full[5]) if len(full) > 5 else 0.0
    return _Counted(target, tuple(prefix), tuple(full), smoothing)


def _sum_and_count(graph: fx.Graph, node: fx.Node, counted: _Counted) -> Term:
    """The same loss summed, and the weight of the targets that it counts."""
    full = list(counted.args)
    full[3] = 2
    labels, weight, ignored = full[1], full[2], full[4]
    with graph.inserting_before(node):
        total = graph.create_node(
            "call_function", node.target, (*counted.prefix, *full), {}, node.name
        )
        total.meta.update(node.meta)
        valid = graph.call_function(aten.ne.Scalar, (labels, ignored))
        if weight is None:
            count = graph.call_function(aten.sum.default, (valid,))
        else:
            known = graph.call_function(aten.mul.Tensor, (labels, valid))
            picked = graph.call_function(aten.index.Tensor, (weight, [known]))
            kept = graph.call_function(aten.mul.Tensor, (picked, valid))
            count = graph.call_function(aten.sum.default, (kept,))
    for made in (valid, count, *([known, picked, kept] if weight is not None else [])):
        made.meta["origin"] = node.meta.get("origin")
    return Term(total, "sum_count", count)
