"""Rewrites an exported graph into the form that stages are cut from.

- parameters and buffers under the model's own names, ties by the first name;
- a first placeholder ``micro_batch_size``; every integer is arithmetic on it;
- ``no_grad`` and ``autocast`` regions inlined, checks of metadata removed;
- ``squeeze`` never touches the batch, so that one sample is as good as many;
- opaque calls become ``call_module`` nodes.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from graphpipe.errors import CaptureError
from graphpipe.graph.autocast import call_under_autocast
from graphpipe.graph.iteration import is_concatenation, refused
from graphpipe.graph.model_graph import BATCH_SIZE_INPUT
from graphpipe.graph.signature import Signature
from graphpipe.graph.symbolic import node_of
from graphpipe.graph.tracing import LOSS_PREFIX, MODEL_PREFIX, Trace
from graphpipe.graph.watch import is_user_file

aten = torch.ops.aten

CONSTANT_PREFIX = "_constants."
"""Lifted constants (``torch.tensor(4.0)`` in a forward) are named so in the program."""

SUBGRAPH_PREFIX = "_subgraphs."

_DROPPED = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
_DROPOUTS = {
    aten.dropout.default,
    aten.alpha_dropout.default,
    aten.feature_dropout.default,
    aten.feature_alpha_dropout.default,
}
_SCALAR_UPDATES = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
}


@dataclass(eq=False)
class Normal:
    """The rewritten graph, without an output node yet.

    Attributes:
        graph: The graph.
        batch: The placeholder of the micro-batch size.
        inputs: The placeholders of the signature's tensors, in order.
        losses: The addends of the loss.
        values: The tensors that the model returns.
        lists: Whether the model returns a list with one tensor a sample in a value's place.
        constants: Lifted constants by their name in the graph.
        modules: Opaque modules and sub-graphs by their name in the graph.
    """

    graph: fx.Graph
    batch: fx.Node
    inputs: list[fx.Node]
    losses: list[fx.Node]
    values: list[fx.Node]
    lists: tuple[bool, ...]
    constants: dict[str, torch.Tensor]
    modules: dict[str, nn.Module]


@dataclass(frozen=True)
class Origin:
    """Where an op comes from: module path, call number of that module, ``file:line``."""

    module: str = ""
    call: int = 0
    source: str = ""


def origin_of(node: fx.Node) -> Origin:
    """The origin that :func:`normalise` has noted on a node."""
    found = node.meta.get("origin")
    return found if isinstance(found, Origin) else Origin()


def normalise(
    trace: Trace, signature: Signature, names: Mapping[str, str], model: nn.Module
) -> Normal:
    """Rewrites the exported graph (see the module's docstring).

    Args:
        trace: The export.
        signature: The inputs; one placeholder of the export for each of its tensors.
        names: Name of a parameter or buffer in the export -> canonical name.
        model: The model, for its opaque modules.

    Raises:
        CaptureError: if a size depends on data.
    """
    return _Rewriter(trace, signature, names, model).run()


class _Rewriter:
    def __init__(
        self, trace: Trace, signature: Signature, names: Mapping[str, str], model: nn.Module
    ) -> None:
        self._trace = trace
        self._signature = signature
        self._names = names
        self._model = model
        self._graph = fx.Graph()
        self._batch = self._graph.placeholder(BATCH_SIZE_INPUT)
        self._symbol: sympy.Symbol | None = None
        self._integers: dict[sympy.Expr, fx.Node | int] = {}
        self._tensors: dict[str, fx.Node] = {}
        self._constants: dict[str, torch.Tensor] = {}
        self._modules: dict[str, nn.Module] = {}

    def run(self) -> Normal:
        exported = self._trace.module
        placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
        leaves = self._signature.tensors
        assert len(placeholders) == len(leaves)
        environment: dict[fx.Node, Any] = {}
        inputs: list[fx.Node] = []
        for old, leaf in zip(placeholders, leaves, strict=True):
            node = self._graph.placeholder(leaf.name)
            environment[old] = node
            inputs.append(node)
            if leaf.rows and self._symbol is None:
                self._symbol = _batch_symbol(old, leaf.rows)
        result = self._inline(exported, environment, autocast=None, grad=True)
        flat = pytree.tree_leaves(result)
        count = len(self._trace.loss_names)
        returned = pytree.tree_leaves(next(iter(reversed(exported.graph.nodes))).args)
        assert len(returned) == len(flat)
        return Normal(
            self._graph,
            self._batch,
            inputs,
            flat[:count],
            flat[count:],
            tuple(_is_stand_in([node]) for node in returned[count:]),
            self._constants,
            self._modules,
        )

    def _inline(
        self,
        module: fx.GraphModule,
        environment: dict[fx.Node, Any],
        *,
        autocast: tuple[Any, ...] | None,
        grad: bool,
    ) -> Any:
        """Copies the nodes of ``module``; returns what its output node returns."""
        for node in module.graph.nodes:
            if node in environment:
                continue
            if node.op == "output":
                return map_arg(node.args[0], environment.__getitem__)
            if node.op == "get_attr":
                environment[node] = self._attribute(module, node)
            else:
                environment[node] = self._call(node, environment, autocast, grad)
        raise AssertionError("a graph without an output")

    def _attribute(self, module: fx.GraphModule, node: fx.Node) -> Any:
        target = str(node.target)
        held: Any = module
        for part in target.split("."):
            held = getattr(held, part)
        if isinstance(held, nn.Module):
            return held
        name = self._names.get(target)
        if name is None:
            name = CONSTANT_PREFIX + target.removeprefix(MODEL_PREFIX).replace(".", "_")
            self._constants[name] = held
        if name not in self._tensors:
            self._tensors[name] = self._graph.create_node("get_attr", name)
        return self._tensors[name]

    def _call(
        self,
        node: fx.Node,
        environment: Mapping[fx.Node, Any],
        autocast: tuple[Any, ...] | None,
        grad: bool,
    ) -> Any:
        target = node.target
        value = node.meta.get("val")
        if target in _DROPPED:
            return None
        if target is torch.ops.higher_order.run_with_rng_state:
            origin = _origin(node)
            raise CaptureError(
                "The model runs an operator with a random state of its own",
                where=f"module {origin.module!r}, {origin.source or node.name}",
                expected="random numbers from the default generator, which a stage seeds itself",
                got=str(target),
                fix=f"Take the random state out of it, or capture with opaque=[{origin.module!r}]",
            )
        if isinstance(value, torch.SymInt):
            return self._integer(value.node.expr, node)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        args: Any = map_arg(node.args, environment.__getitem__)
        kwargs: Any = map_arg(node.kwargs, environment.__getitem__)
        if target is operator.getitem and isinstance(args[0], (tuple, list)):
            return args[0][args[1]]
        if target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            return self._region(args[1], args[2:], autocast, grad=bool(args[0]), outer=grad)
        if target is torch.ops.higher_order.wrap_with_autocast:
            device, dtype, enabled, _cache, body, *rest = args
            return self._region(body, rest, (device, dtype, enabled), grad=grad, outer=grad)
        if target is torch.ops.graphpipe.opaque.default:
            return self._opaque(node, args)
        if target is torch.ops.graphpipe.every_sample.default:
            if not all(is_concatenation(user, node) for user in node.users):
                origin = _origin(node)
                raise refused(origin.module, origin.source)
            target, args = aten.flatten.using_ints, (args[0], 0, 1)
        if target is aten.cat.default and _is_stand_in(node.args[0]):
            return args[0][0]
        simpler = self._simplified(node, args)
        if simpler is not None:
            return simpler
        args = self._with_subgraphs(args)
        if node.op == "call_function" and isinstance(target, torch._ops.OpOverload) and autocast:
            args = (*autocast, target, *args)
            target = call_under_autocast
        new = self._graph.create_node("call_function", target, tuple(args), kwargs, node.name)
        new.meta["origin"] = _origin(node)
        return new

    def _region(
        self,
        body: fx.GraphModule,
        args: Any,
        autocast: tuple[Any, ...] | None,
        *,
        grad: bool,
        outer: bool,
    ) -> Any:
        """Inlines a no_grad, enable_grad or autocast region.

        Without gradients, the region reads detached values: nothing in it has a backward. What
        it only wrote to in place (a weight that is normalised before its use) is still the value
        from outside: the reader after the region gives it a gradient.
        """
        if grad and not outer:
            raise CaptureError(
                "The model switches gradients on again inside of a no_grad region",
                fix="Move that code out of the no_grad region",
            )
        given = args
        if not grad:
            args = tuple(self._detached(arg) if isinstance(arg, fx.Node) else arg for arg in args)
        places = [node for node in body.graph.nodes if node.op == "placeholder"]
        environment: dict[fx.Node, Any] = dict(zip(places, args, strict=True))
        results = self._inline(body, environment, autocast=autocast, grad=grad)
        if grad or not isinstance(results, (tuple, list)):
            return results
        outside = dict(zip(places, given, strict=True))
        returned = next(node for node in body.graph.nodes if node.op == "output").args[0]
        return tuple(
            outside.get(_written(node), result)
            for node, result in zip(returned, results, strict=True)
        )

    def _detached(self, node: fx.Node) -> fx.Node:
        if node is self._batch or node.target is aten.detach.default:
            return node
        new = self._graph.call_function(aten.detach.default, (node,))
        new.meta["origin"] = origin_of(node)
        return new

    def _integer(self, expression: sympy.Expr, node: fx.Node) -> fx.Node | int:
        if expression not in self._integers:
            try:
                if self._symbol is None:
                    raise CaptureError("A size depends on data")
                built = node_of(expression, self._symbol, self._graph, self._batch)
            except CaptureError as error:
                raise size_refused(node, error.what, str(expression)) from None
            self._integers[expression] = built
        return self._integers[expression]

    def _opaque(self, node: fx.Node, args: tuple[Any, ...]) -> Any:
        site = self._trace.opaque.sites[args[1]]
        tensors = args[0]
        leaves = [tensors[item] if isinstance(item, int) else item[0] for item in site.leaves]
        call_args, call_kwargs = pytree.tree_unflatten(leaves, site.spec)
        self._modules[site.path] = self._model.get_submodule(site.path)
        call = self._graph.create_node(
            "call_module",
            site.path,
            tuple(call_args),
            call_kwargs,
            site.path.replace(".", "_"),
        )
        origin = _origin(node)
        call.meta["origin"] = Origin(site.path, origin.call, origin.source)
        call.meta["opaque"] = site
        results = []
        for key_path, _ in pytree.tree_flatten_with_path(
            pytree.tree_unflatten([0] * len(site.outputs), site.output_spec)
        )[0]:
            value: fx.Node = call
            for key in key_path:
                if isinstance(key, pytree.SequenceKey):
                    step: Any = key.idx
                elif isinstance(key, pytree.MappingKey):
                    step = key.key
                else:
                    raise CaptureError(
                        "An opaque module must return tensors, tuples, lists or dicts",
                        where=site.path,
                        got=str(site.output_spec),
                    )
                value = self._graph.call_function(operator.getitem, (value, step))
                value.meta["origin"] = call.meta["origin"]
            results.append(value)
        return results

    def _simplified(self, node: fx.Node, args: tuple[Any, ...]) -> Any:
        """A simpler value for ops that do nothing, or that would differ for one sample."""
        target = node.target
        if target in _DROPOUTS and (not args[2] or args[1] == 0):
            return args[0]
        if target is aten.lift_fresh_copy.default or target is aten.lift_fresh.default:
            return args[0]
        if target is aten.detach_.default and _is_constant(node.args[0]):
            return args[0]
        if target in _SCALAR_UPDATES and _fresh_scalar(node):
            # `loss += term`: the addends of a loss are peeled off, so it must be an addition.
            new = self._graph.create_node(
                "call_function", _SCALAR_UPDATES[target], tuple(args), dict(node.kwargs), node.name
            )
            new.meta["origin"] = _origin(node)
            return new
        if target is aten.broadcast_tensors.default:
            wanted = [tuple(value.shape) for value in node.meta["val"]]
            sources: Any = node.args[0]
            have = [tuple(source.meta["val"].shape) for source in sources]
            return list(args[0]) if wanted == have else None
        if target is aten.slice.Tensor and _is_everything(args):
            return args[0]
        if target in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
            return self._squeeze(node, args)
        return None

    def _squeeze(self, node: fx.Node, args: tuple[Any, ...]) -> Any:
        """Names the dimensions, so that a batch of one sample keeps its own."""
        source: Any = node.args[0]
        shape = source.meta["val"].shape
        if node.target is aten.squeeze.default:
            chosen = list(range(len(shape)))
        else:
            given = args[1] if isinstance(args[1], (tuple, list)) else [args[1]]
            chosen = [d % len(shape) for d in given] if len(shape) else []
        ones = [d for d in chosen if isinstance(shape[d], int) and shape[d] == 1]
        if len(ones) == len(chosen) and node.target is not aten.squeeze.default:
            return None
        if not ones:
            return args[0]
        new = self._graph.create_node(
            "call_function", aten.squeeze.dims, (args[0], ones), {}, node.name
        )
        new.meta["origin"] = _origin(node)
        return new

    def _with_subgraphs(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Sub-graphs among the arguments (``torch.cond``) become attributes of the program."""

        def named(value: Any) -> Any:
            if not isinstance(value, nn.Module):
                return value
            name = f"{SUBGRAPH_PREFIX}body_{len(self._modules)}"
            self._modules[name] = value
            return self._graph.create_node("get_attr", name)

        return tuple(named(value) for value in args)


def size_refused(node: fx.Node, what: str, got: str | None = None) -> CaptureError:
    """The refusal of a node of the export whose size depends on data."""
    origin = _origin(node)
    path = origin.module
    inside = path and path != "loss_fn" and not path.startswith(LOSS_PREFIX)
    return CaptureError(
        what,
        where=f"module {path!r}, {origin.source or node.name}",
        expected="sizes that depend on nothing but the number of samples",
        got=got,
        fix="Use masks (torch.where), of which sums and means may be taken, instead of boolean "
        + (
            f"indexing, or capture with opaque=[{path!r}], so that the module stays one op"
            if inside
            else "indexing, or move this code into a submodule of the model and capture with "
            "opaque=[its path]"
        ),
    )


def _batch_symbol(placeholder: fx.Node, rows: int) -> sympy.Symbol:
    size = placeholder.meta["val"].shape[0]
    assert isinstance(size, torch.SymInt)
    symbols = size.node.expr.free_symbols
    assert len(symbols) == 1
    symbol: sympy.Symbol = next(iter(symbols))
    assert size.node.expr == rows * symbol
    return symbol


def _written(node: Any) -> Any:
    """What an in-place op wrote to, through a chain of them; another value is itself."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        if not getattr(node.target, "_opname", "").endswith("_"):
            break
        node = node.args[0]
    return node


def _is_constant(node: Any) -> bool:
    """Whether a value of the export is a lifted constant, possibly copied."""
    while isinstance(node, fx.Node) and node.target is aten.lift_fresh_copy.default:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.op == "get_attr"


def _is_stand_in(tensors: Any) -> bool:
    """Whether a concatenation has all samples of a batch as its one operand."""
    stand_in = torch.ops.graphpipe.every_sample.default
    return len(tensors) == 1 and getattr(tensors[0], "target", None) is stand_in


def _is_everything(args: tuple[Any, ...]) -> bool:
    """Whether a slice takes the whole dimension (``x[:, 1]`` is recorded with one)."""
    start = args[2] if len(args) > 2 else None
    end = args[3] if len(args) > 3 else None
    step = args[4] if len(args) > 4 else 1
    return start in (None, 0) and end in (None, sys.maxsize) and step == 1


def _fresh_scalar(node: fx.Node) -> bool:
    """Whether an in-place op updates a scalar that nothing else reads or shares."""
    first = node.args[0]
    return (
        isinstance(first, fx.Node)
        and first.op == "call_function"
        and first.meta["val"].dim() == 0
        and set(first.users) == {node}
        and getattr(first.target, "_opname", "") not in ("select", "view", "getitem", "squeeze")
        and isinstance(first.target, torch._ops.OpOverload)
        and all(item.alias_info is None for item in first.target._schema.returns)
    )


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def _origin(node: fx.Node) -> Origin:
    module, call = "", 0
    stack = node.meta.get("nn_module_stack")
    if stack:
        key, entry = list(stack.items())[-1]
        path = str(entry[0])
        if path == "model" or path.startswith(MODEL_PREFIX):
            module = path.removeprefix("model").removeprefix(".")
        elif path in ("", "loss_fn") or path.startswith(LOSS_PREFIX):
            module = path or "loss_fn"
        if "@" in key:
            call = int(key.rsplit("@", 1)[1])
    source = ""
    for file, line in _FRAME.findall(node.meta.get("stack_trace") or ""):
        if is_user_file(file):
            source = f"{file}:{line}"
    return Origin(module, call, source)
