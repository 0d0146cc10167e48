"""Finds the joins of a graph that can be split.

A join is a linear whose input is a concatenation along the features, or follows from
concatenations by ops that act element by element: then every column block of the weight meets
the features of one piece alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from graphpipe.graph.autocast import operator_of
from graphpipe.graph.fake_run import FakeRun, Seen
from graphpipe.graph.model_graph import ModelGraph

aten = torch.ops.aten

DROPOUTS = (aten.dropout.default, aten.dropout_.default)
CONCATENATIONS = (aten.cat.default, aten.concat.default, aten.concatenate.default)
_COPIES = {"clone", "contiguous", "to", "_to_copy", "alias", "detach", "positive"}
_FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, eq=False)
class Join:
    """A linear over a concatenation.

    Attributes:
        linear: Its node.
        x: The features it reads: a concatenation, or what follows from some element by element.
        weight: The node of its weight.
        bias: That of its bias, or None.
        transposed: Whether the weight is [features, out], as in ``x @ weight``.
        widths: Features of each piece.
        region: The nodes from the concatenations to ``x``, in graph order.
    """

    linear: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool
    widths: tuple[int, ...]
    region: tuple[fx.Node, ...]

    @property
    def name(self) -> str:
        """Canonical name of the weight."""
        return str(self.weight.target)


@dataclass
class Joins:
    """What was found.

    Attributes:
        joins: The joins that can be split, in graph order.
        refused: Linears over a concatenation that cannot: (name of the op, why).
    """

    joins: list[Join] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)


def find_joins(graph: ModelGraph, nodes: list[fx.Node], run: FakeRun) -> Joins:
    """The joins of a graph.

    Args:
        graph: The graph.
        nodes: The nodes of its program, in order.
        run: A fake run of them.
    """
    return _Finder(graph, nodes, run).find()


class Writes:
    """Which nodes write to which storages, and when.

    Args:
        nodes: The nodes in order.
        run: A fake run of them.
    """

    def __init__(self, nodes: list[fx.Node], run: FakeRun) -> None:
        self._values = {node: seen.values for node, seen in run.nodes.items()}
        self.order = {node: i for i, node in enumerate(nodes)}
        self._writers: dict[int, list[fx.Node]] = {}
        for node in nodes:
            seen = run.nodes.get(node)
            for storage in seen.mutates if seen is not None else ():
                self._writers.setdefault(storage, []).append(node)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Takes note that ``new`` stands where ``old`` stood."""
        self.order[new] = self.order[old]
        self._values[new] = self._values[old]
        for writers in self._writers.values():
            writers[:] = [new if node is old else node for node in writers]

    def writers(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes that write to the memory of a value, in order."""
        for value in self._values[node]:
            yield from self._writers.get(value.storage, ())

    def changed_after(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether the memory of a value is written to after ``reader``."""
        return any(self.order[other] > self.order[reader] for other in self.writers(node))


class _Finder:
    def __init__(self, graph: ModelGraph, nodes: list[fx.Node], run: FakeRun) -> None:
        self._graph = graph
        self._nodes = nodes
        self._run = run
        self._writes = Writes(nodes, run)
        self._widths: dict[fx.Node, tuple[int, ...]] = {}
        self._uses: dict[str, int] = {}
        for node in nodes:
            for source in node.all_input_nodes:
                if source.op == "get_attr":
                    name = str(source.target)
                    self._uses[name] = self._uses.get(name, 0) + len(_places(node, source))
            for name in node.meta.get("parameters", ()) if node.op == "call_module" else ():
                self._uses[name] = self._uses.get(name, 0) + 1

    def find(self) -> Joins:
        found = Joins()
        for node in self._nodes:
            if node.op != "call_function":
                continue
            widths = self._layout(node)
            if widths is not None:
                self._widths[node] = widths
                continue
            parts = self._linear(node)
            if parts is None:
                continue
            x, weight, bias, transposed = parts
            reason = self._reason(node, x, weight, bias, transposed)
            if reason is not None:
                found.refused.append((node.name, reason))
                continue
            region = self._region(x)
            found.joins.append(
                Join(node, x, weight, bias, transposed, self._widths[x], tuple(region))
            )
        return found

    # What stays in pieces

    def _layout(self, node: fx.Node) -> tuple[int, ...] | None:
        """Widths of the pieces that the last dimension of a value is made of."""
        seen = self._run.nodes[node]
        op = self._graph.op_by_name.get(node.name)
        if op is None or op.coupled or seen.is_tuple or len(seen.values) != 1:
            return None
        target, args, kwargs = operator_of(node)
        value = seen.values[0]
        if not args:
            return None
        if target in CONCATENATIONS:
            return self._of_concatenation(value, args, kwargs)
        if target not in DROPOUTS and (op.random or not _is_elementwise(target)):
            return None
        if isinstance(args[0], (list, tuple)):
            return None
        widths: tuple[int, ...] | None = None
        for source in node.all_input_nodes:
            given = self._seen(source)
            if given is None:
                continue
            if source in self._widths:
                if widths not in (None, self._widths[source]):
                    return None
                widths = self._widths[source]
            elif given.shape and given.shape[-1] != 1:
                return None
        if widths is None or value.shape[-1] != sum(widths):
            return None
        if target in DROPOUTS and self._seen(args[0]) is None:
            return None
        if seen.mutates and not self._alone(node, args[0]):
            return None
        return widths

    def _of_concatenation(
        self, value: Seen, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[int, ...] | None:
        pieces = args[0]
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        if dim % len(value.shape) != len(value.shape) - 1 or len(value.shape) < 2:
            return None
        seen = [self._seen(piece) for piece in pieces]
        if any(s is None or s.dtype != value.dtype or len(s.shape) < 2 for s in seen):
            return None
        widths = tuple(s.shape[-1] for s in seen if s is not None)
        return widths if len(widths) > 1 and all(widths) else None

    def _seen(self, node: fx.Node) -> Seen | None:
        """The one tensor that a node gives; None for numbers and tuples."""
        found = self._run.nodes.get(node)
        if found is None or found.is_tuple or len(found.values) != 1:
            return None
        return found.values[0]

    def _alone(self, node: fx.Node, written: fx.Node) -> bool:
        """Whether nobody else sees the memory that an op in place changes."""
        storage = self._run.nodes[node].values[0].storage
        if written not in self._widths:
            return False
        sharing = [
            other
            for other in self._nodes
            if other is not node
            and self._writes.order[other] < self._writes.order[node]
            and any(v.storage == storage for v in self._run.nodes[other].values)
        ]
        return all(other in self._widths and len(other.users) == 1 for other in sharing)

    # What meets the pieces

    def _linear(self, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, bool] | None:
        """(features, weight, bias, transposed) of a linear over something in pieces."""
        target, args, kwargs = operator_of(node)
        bias: Any = None
        if target is aten.linear.default:
            x, weight, transposed = args[0], args[1], False
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
        elif target in (aten.matmul.default, aten.mm.default):
            x, weight, transposed = args[0], args[1], True
        elif target is aten.addmm.default and not kwargs and len(args) == 3:
            bias, x, weight, transposed = args[0], args[1], args[2], True
        else:
            return None
        if x not in self._widths or not isinstance(weight, fx.Node):
            return None
        return x, weight, bias, transposed

    def _reason(
        self,
        node: fx.Node,
        x: fx.Node,
        weight: fx.Node,
        bias: fx.Node | None,
        transposed: bool,
    ) -> str | None:
        """Why a linear over a concatenation cannot be split."""
        name = str(weight.target)
        item = self._graph.parameter_by_name.get(name) if weight.op == "get_attr" else None
        assert self._graph.program is not None
        if item is None or not isinstance(self._graph.program.state.get(name), nn.Parameter):
            return "its weight is computed, or no parameter"
        if item.aliases:
            return f"its weight {name} is tied to {item.aliases[0]}"
        if not item.persistent:
            return f"its weight {name} is not part of the model's state"
        if item.slice is not None:
            return f"its weight is {name} already"
        if self._uses.get(name, 0) != 1:
            return f"its weight {name} is read {self._uses[name]} times"
        if len(item.shape) != 2 or item.dtype not in _FLOATS:
            return f"its weight {name} is no matrix of floating-point numbers"
        if item.shape[0 if transposed else 1] != sum(self._widths[x]):
            return "its features are not those of the concatenation"
        if self._graph.op_by_name[node.name].coupled:
            return "it mixes samples"
        if bias is not None and bias.op != "get_attr":
            return "its bias is computed"
        for member in self._region(x):
            for source in member.all_input_nodes:
                if source not in self._widths and self._writes.changed_after(source, member):
                    return f"{source.name}, which it reads, is changed in place later"
        return None

    def _region(self, x: fx.Node) -> list[fx.Node]:
        found: set[fx.Node] = set()
        stack = [x]
        while stack:
            node = stack.pop()
            if node in found:
                continue
            found.add(node)
            target, _, _ = operator_of(node)
            if target not in CONCATENATIONS:
                stack += [source for source in node.all_input_nodes if source in self._widths]
        return sorted(found, key=self._writes.order.__getitem__)


def _is_elementwise(target: Any) -> bool:
    """Whether every element of the result depends on the elements in its place alone."""
    if getattr(target, "namespace", "") != "aten":
        return False
    if target._opname in _COPIES:
        return True
    return torch.Tag.pointwise in target.tags and functional(target) is not None


def functional(target: Any) -> Any:
    """The op that does the same out of place; itself if it writes to nothing.

    None where there is none of the same arguments.
    """
    if not target._schema.is_mutable:
        return target
    packet = getattr(aten, target._opname.removesuffix("_"), None)
    found = getattr(packet, target._overloadname, None) if packet is not None else None
    if found is None or found._schema.is_mutable:
        return None
    names = [argument.name for argument in found._schema.arguments]
    return found if names == [argument.name for argument in target._schema.arguments] else None


def _places(node: fx.Node, source: fx.Node) -> list[Any]:
    """The arguments of a node that are ``source``."""
    found: list[Any] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: found.append(n) if n is source else None)
    return found
