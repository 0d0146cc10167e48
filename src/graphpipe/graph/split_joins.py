"""``split_joins``: a linear over a concatenation becomes a partial linear for each piece.

``y = W [x_1 ... x_n] + c`` equals the sum of ``W_i x_i`` and ``c``. The linear after a
concatenation of branches is often the largest op of a model, and bounds its pipeline: nothing
of it can start before every branch has ended. Split, each branch's stage multiplies its own
columns of the weight, and only the sum is left where the branches meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import fx, nn

from graphpipe.errors import GraphError
from graphpipe.graph.autocast import call_under_autocast, operator_of
from graphpipe.graph.fake_run import FakeRun, TensorShape, fake_run
from graphpipe.graph.fit import SAMPLE_SIZES
from graphpipe.graph.joins import (
    CONCATENATIONS,
    DROPOUTS,
    Join,
    Joins,
    Writes,
    find_joins,
    functional,
)
from graphpipe.graph.model_graph import JoinSplit, ModelGraph, Op, Parameter, ParamSlice
from graphpipe.graph.observed import Observed
from graphpipe.graph.partial import dropout_of_piece, join_sum, partial_linear
from graphpipe.graph.program import Program
from graphpipe.graph.recipe import Recipe

LEAST_SHARE = 1 / 16
"""Pieces with less of the features than this are joined with their neighbours first: many
thin products with results of full width take longer than they save."""


def split_joins(graph: ModelGraph, joins: Iterable[JoinSplit] | None = None) -> ModelGraph:
    """The graph with its joins split, equal to it up to the order of summation.

    A join is a linear (``nn.Linear``, ``x @ weight``, ``addmm``) that reads a concatenation
    along the features, or what element-wise ops (activations, casts, dropout, factors that are
    the same for all features) make of it. Its weight may have no other name and no other
    reader. Partial results add up, and pass between stages, in fp32 where the linear runs in
    half precision. The bias is added once. A dropout of the concatenation drops what it would
    have dropped.

    The weight keeps its one name: ``parameters`` lists its slices, see
    :class:`~graphpipe.graph.model_graph.ParamSlice`. Ops that the rewrite does not touch keep
    names and keys, and the sum has those of the linear.

    Args:
        graph: A graph with its program, as :func:`~graphpipe.graph.capture.capture` returns it.
        joins: Which weights are cut, and where (``ModelGraph.joins`` of another graph of the
            same model). By default all that can be, one slice a piece; neighbours that bring
            less than :data:`LEAST_SHARE` of the features count as one piece.

    Raises:
        GraphError: if the graph has no program, or a join is not there or cannot be split; with
            the reason.
    """
    rewriter = _Rewriter(graph)
    return rewriter.run(None if joins is None else {item.parameter: item for item in joins})


def splittable(graph: ModelGraph) -> Joins:
    """The joins of a graph that :func:`split_joins` would split, and those that it cannot.

    Raises:
        GraphError: if the graph has no program.
    """
    program = _program_of(graph)
    nodes = list(program.module.graph.nodes)
    return find_joins(graph, nodes, _run(graph, program, program.module.graph, 2, {}))


def grouped(widths: Sequence[int], least_share: float = LEAST_SHARE) -> tuple[int, ...]:
    """Widths of the slices for these pieces: thin neighbours are put together."""
    least = least_share * sum(widths)
    out: list[int] = []
    gathered = 0
    for width in widths:
        gathered += width
        if gathered >= least:
            out.append(gathered)
            gathered = 0
    if gathered and out:
        out[-1] += gathered
    return tuple(out)


def _program_of(graph: ModelGraph) -> Program:
    if graph.program is None:
        raise GraphError(
            "Joins are split in the program of a graph, and this one has none",
            where=f"graph {graph.name!r}",
            expected="a graph that graphpipe.capture made in this process",
            fix="Capture the model again",
        )
    return graph.program


def _run(
    graph: ModelGraph,
    program: Program,
    nodes: fx.Graph,
    samples: int,
    cache: dict[object, Recipe],
    state: Mapping[str, torch.Tensor] | None = None,
) -> FakeRun:
    """A fake run of the program, or of what it was rewritten to."""
    shapes = {
        name: TensorShape(
            tuple(value.shape),
            tuple(value.stride()),
            value.dtype,
            isinstance(value, nn.Parameter) and value.requires_grad,
        )
        for name, value in (state or program.state).items()
    }
    inputs: dict[str, TensorShape] = {}
    for item in graph.inputs:
        shape = item.spec.concrete_shape(samples)
        stride = tuple(torch.empty(shape, device="meta").stride())
        inputs[item.name] = TensorShape(shape, stride, getattr(torch, item.spec.dtype))
    return fake_run(nodes, samples, shapes, inputs, gradients=graph.training, cache=cache)


class _Rewriter:
    def __init__(self, graph: ModelGraph) -> None:
        self._old = graph
        self._program = _program_of(graph)
        self._graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self._program.module.graph.nodes:
            copies[node] = self._graph.node_copy(node, copies.__getitem__)
            assert copies[node].name == node.name
        self._cache: dict[object, Recipe] = {}
        nodes = list(self._graph.nodes)
        run = _run(graph, self._program, self._graph, 2, self._cache)
        self._found = find_joins(graph, nodes, run)
        self._writes = Writes(nodes, run)
        self._ops: dict[fx.Node, Op] = {}
        self._state = dict(self._program.state)
        self._slices: dict[str, list[Parameter]] = {}
        self._pieces: dict[tuple[fx.Node, tuple[int, ...]], list[fx.Node]] = {}

    def run(self, wanted: Mapping[str, JoinSplit] | None) -> ModelGraph:
        chosen = self._chosen(wanted)
        if not chosen:
            return self._old
        for join, widths in chosen:
            self._split(join, widths)
        self._sweep({node for join, _ in chosen for node in (*join.region, join.weight)})
        return self._rebuilt()

    def _chosen(self, wanted: Mapping[str, JoinSplit] | None) -> list[tuple[Join, tuple[int, ...]]]:
        """The joins to split, each with the widths of its slices."""
        joins = {join.name: join for join in self._found.joins}
        if wanted is None:
            found = [(join, grouped(join.widths)) for join in joins.values()]
            found = [(join, widths) for join, widths in found if len(widths) > 1]
            if not found:
                raise GraphError(
                    "This graph has no join to split",
                    where=f"graph {self._old.name!r}",
                    expected="a linear over a concatenation of features, none of which brings "
                    f"nearly all of them{self._why()}",
                )
            return found
        out: list[tuple[Join, tuple[int, ...]]] = []
        for name, item in wanted.items():
            join = joins.get(name)
            if join is None:
                raise GraphError(
                    f"The join of {name} cannot be split here{self._why()}",
                    where=f"graph {self._old.name!r}",
                    expected="a linear over a concatenation of features that alone reads it",
                )
            if not set(accumulate(item.widths)) <= set(accumulate(join.widths)) or sum(
                item.widths
            ) != sum(join.widths):
                raise GraphError(
                    f"The slices of {name} are not those of the concatenation",
                    where=f"graph {self._old.name!r}, op {join.linear.name}",
                    expected=f"neighbours put together, of pieces of {join.widths}",
                    got=item.widths,
                )
            out.append((join, item.widths))
        return out

    def _why(self) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self._found.refused[:3])
        return f" ({reasons})" if reasons else ""

    # Rewriting

    def _split(self, join: Join, widths: tuple[int, ...]) -> None:
        linear = self._old.op_by_name[join.linear.name]
        for node in join.region:
            self._cut(node, join, widths)
        partials: list[fx.Node] = []
        dim = 0 if join.transposed else 1
        for i, (piece, start, width) in enumerate(
            zip(self._pieces[join.x, widths], _starts(widths), widths, strict=True)
        ):
            key = self._slice(join.name, dim, start, width)
            args = (piece, key, True) if join.transposed else (piece, key)
            partials.append(
                self._add(
                    f"{linear.name}_part{i}", join.linear, partial_linear, args,
                    linear, f"[{i}]",
                )
            )  # fmt: skip
        assert linear.output is not None
        dtype = getattr(torch, linear.output.dtype)
        with self._graph.inserting_before(join.linear):
            total = self._call(join.linear, join_sum, (join.bias, dtype, *partials))
        join.linear.replace_all_uses_with(total)
        name = join.linear.name
        self._writes.replace(join.linear, total)
        self._graph.erase_node(join.linear)
        # The sum stands for the linear: outputs, losses and other variants know its name.
        total.name = name
        self._ops[total] = linear.model_copy(
            update={
                "target": _target(join_sum),
                "parameters": () if join.bias is None else self._names((join.bias,)),
            }
        )

    def _cut(self, node: fx.Node, join: Join, widths: tuple[int, ...]) -> None:
        """Makes what ``node`` is for each slice."""
        if (node, widths) in self._pieces:
            return
        op = self._old.op_by_name[node.name]
        target, args, kwargs = operator_of(node)
        pieces: list[fx.Node] = []
        if target in CONCATENATIONS:
            given = list(args[0])
            for i, (first, last) in enumerate(_ranges(join.widths, widths)):
                if last - first == 1:
                    pieces.append(given[first])
                    continue
                dim = args[1] if len(args) > 1 else kwargs["dim"]
                pieces.append(
                    self._add(
                        f"{op.name}_piece{i}", node, torch.ops.aten.cat.default,
                        (given[first:last], dim), op, f"[{i}]",
                    )
                )  # fmt: skip
            self._pieces[node, widths] = pieces
            return
        total = sum(widths)
        for i, (start, _) in enumerate(zip(_starts(widths), widths, strict=True)):
            place = _Place(self._pieces, widths, i)
            arguments: tuple[Any, ...] = fx.node.map_arg(args, place)
            named: dict[str, Any] = fx.node.map_arg(kwargs, place)
            called: Callable[..., Any] = functional(target) if target not in DROPOUTS else target
            seed: str | None = None
            if target in DROPOUTS:
                rate = arguments[1] if len(arguments) > 1 else named["p"]
                train = arguments[2] if len(arguments) > 2 else named["train"]
                called, named = dropout_of_piece, {}
                arguments = (arguments[0], rate, train, -1, start, total)
                seed = op.random_key or op.key
            pieces.append(
                self._add(
                    f"{op.name}_piece{i}", node, called, arguments, op, f"[{i}]",
                    named, seed,
                )
            )  # fmt: skip
        self._pieces[node, widths] = pieces

    def _slice(self, name: str, dim: int, start: int, length: int) -> fx.Node:
        """The node of a slice of a weight."""
        item = self._old.parameter_by_name[name]
        part = ParamSlice(of=name, dim=dim, start=start, length=length, full_shape=item.shape)
        shape = list(item.shape)
        shape[dim] = length
        self._slices.setdefault(name, []).append(
            item.model_copy(update={"name": part.name, "shape": tuple(shape), "slice": part})
        )
        whole = self._program.state[name]
        # A view of the model's own values; the ranks take copies.
        self._state[part.name] = nn.Parameter(
            whole.detach().narrow(dim, start, length), requires_grad=whole.requires_grad
        )
        with self._graph.inserting_before(self._first_op()):
            made: fx.Node = self._graph.create_node("get_attr", part.name)
        return made

    def _first_op(self) -> fx.Node:
        found: fx.Node = next(node for node in self._graph.nodes if node.op != "placeholder")
        return found

    def _add(
        self,
        name: str,
        like: fx.Node,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        op: Op,
        suffix: str,
        kwargs: dict[str, Any] | None = None,
        seed: str | None = None,
    ) -> fx.Node:
        """A new op, for what ``like`` did, as early as what it reads is there."""
        given: list[fx.Node] = []
        fx.node.map_arg((args, kwargs or {}), given.append)
        after = [node for node in given if node.op not in ("placeholder", "get_attr")]
        before = self._writes.order[like]
        for node in given:
            if node in self._writes.order:
                writers = self._writes.writers(node)
                after += [other for other in writers if self._writes.order[other] < before]
        place = max(after) if after else None
        inserting = (
            self._graph.inserting_after(place)
            if place is not None
            else self._graph.inserting_before(like)
        )
        with inserting:
            node = self._call(like, target, args, kwargs, name)
        self._ops[node] = op.model_copy(
            update={
                "name": node.name,
                "target": _target(target),
                "key": op.key + suffix,
                "parameters": self._names(given),
                "mutates": (),
                "prep": False,
                "group": None,
                "random_key": seed,
                "random": seed is not None,
            }
        )
        return node

    def _call(
        self,
        like: fx.Node,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> fx.Node:
        """A call in the autocast region of ``like``, with its origin."""
        named = dict(kwargs or {})
        if like.target is call_under_autocast:
            if isinstance(target, torch._ops.OpOverload):
                args, target = (*like.args[:3], target, *args), call_under_autocast
            elif target is not dropout_of_piece:
                named["region"] = tuple(like.args[1:3])
        node = self._graph.create_node("call_function", target, args, named, name)
        node.meta = dict(like.meta)
        return node

    def _names(self, given: Iterable[fx.Node]) -> tuple[str, ...]:
        """Names of the parameters and buffers among the arguments."""
        found = [str(node.target) for node in given if node.op == "get_attr"]
        known = {*self._old.parameter_by_name}
        known.update(item.name for items in self._slices.values() for item in items)
        return tuple(dict.fromkeys(name for name in found if name in known))

    def _sweep(self, nodes: set[fx.Node]) -> None:
        """Removes what nothing reads any more."""
        for node in reversed(list(self._graph.nodes)):
            if node in nodes and not node.users:
                self._graph.erase_node(node)

    # The graph as data

    def _rebuilt(self) -> ModelGraph:
        old = self._old
        for name in self._slices:
            del self._state[name]
        runs = {
            samples: _run(old, self._program, self._graph, samples, self._cache, self._state)
            for samples in SAMPLE_SIZES
        }
        observed = Observed(runs)
        ops = tuple(
            self._op(node, observed)
            for node in self._graph.nodes
            if node in self._ops or node.name in old.op_by_name
        )
        parameters: list[Parameter] = []
        for item in old.parameters:
            parameters += self._slices.get(item.name, [item])
        fields = {name: getattr(old, name) for name in ModelGraph.model_fields}
        result = ModelGraph(**(fields | {"ops": ops, "parameters": tuple(parameters)}))
        result.attach_program(replace(self._program, module=self._module(), state=self._state))
        return result

    def _op(self, node: fx.Node, observed: Observed) -> Op:
        kept = self._old.op_by_name.get(node.name)
        made = self._ops.get(node)
        inputs = dict.fromkeys(
            source.name
            for source in node.all_input_nodes
            if source in self._ops
            or source.name in self._old.op_by_name
            or source.name in self._old.input_by_name
        )
        changes: dict[str, Any] = {"inputs": tuple(inputs), "saves": observed.saves(node)}
        if made is not None:
            spec = observed.spec(node)
            changes |= {
                "output": spec,
                "requires_grad": spec.requires_grad,
                "forward": observed.work(node, "forward"),
                "backward": observed.work(node, "backward"),
            }
        op = made or kept
        assert op is not None
        return op.model_copy(update=changes)

    def _module(self) -> fx.GraphModule:
        root: dict[str, Any] = {}
        for node in self._graph.nodes:
            if node.op in ("get_attr", "call_module"):
                path = str(node.target)
                held = self._state.get(path)
                root[path] = self._program.module.get_submodule(path) if held is None else held
        module = fx.GraphModule(root, self._graph, class_name=type(self._program.module).__name__)
        self._graph.lint()
        return module


class _Place:
    """Replaces, in arguments, what lies in pieces by its i-th piece."""

    def __init__(
        self,
        pieces: Mapping[tuple[fx.Node, tuple[int, ...]], Sequence[fx.Node]],
        widths: tuple[int, ...],
        number: int,
    ) -> None:
        self._pieces = pieces
        self._widths = widths
        self._number = number

    def __call__(self, node: fx.Node) -> fx.Node:
        found = self._pieces.get((node, self._widths))
        return node if found is None else found[self._number]


def _starts(widths: Sequence[int]) -> list[int]:
    return [0, *accumulate(widths)][:-1]


def _ranges(pieces: Sequence[int], widths: Sequence[int]) -> list[tuple[int, int]]:
    """For each slice, the first piece that it holds and the one after its last."""
    ends = list(accumulate(pieces))
    out: list[tuple[int, int]] = []
    first = 0
    for end in accumulate(widths):
        last = ends.index(end) + 1
        out.append((first, last))
        first = last
    return out


def _target(target: Callable[..., Any]) -> str:
    """The operator as ``Op.target`` names it."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"graphpipe.{target.__name__}"
