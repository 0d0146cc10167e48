"""Puts the pieces of a capture together: the graph as data and its program."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from graphpipe.errors import CaptureError
from graphpipe.graph.atomic import groups, prep_ops
from graphpipe.graph.autocast import operator_of
from graphpipe.graph.dataflow import DataFlow
from graphpipe.graph.expression import Expression
from graphpipe.graph.fake_run import FakeRun, TensorShape
from graphpipe.graph.flow import Kind
from graphpipe.graph.loss_terms import Term
from graphpipe.graph.model_graph import (
    DTYPE_BYTES,
    BatchCondition,
    GraphInput,
    LossTerm,
    ModelGraph,
    Op,
    Parameter,
    TensorSpec,
)
from graphpipe.graph.normalise import CONSTANT_PREFIX, Normal, origin_of
from graphpipe.graph.observed import Observed
from graphpipe.graph.program import OutputLeaf, OutputStructure, Program
from graphpipe.graph.signature import Signature
from graphpipe.graph.symbolic import expression_of
from graphpipe.graph.tracing import LOSS_PREFIX, Trace

_NORMALISATIONS = {
    torch.ops.aten.batch_norm.default: False,
    torch.ops.aten.group_norm.default: True,
}
"""Ops whose Python front refuses one value per channel; whether they count by group."""


@dataclass(frozen=True, eq=False)
class Captured:
    """Everything that a capture has found out; see :func:`graphpipe.graph.capture.capture`."""

    name: str
    training: bool
    model: nn.Module
    loss_fn: nn.Module | None
    signature: Signature
    trace: Trace
    normal: Normal
    terms: list[Term]
    runs: dict[int, FakeRun]
    flow: DataFlow
    tensors: Mapping[str, torch.Tensor]
    shapes: Mapping[str, TensorShape]


def assemble(captured: Captured) -> ModelGraph:
    """The model graph with its program attached."""
    return _Assembly(captured).build()


class _Assembly:
    def __init__(self, captured: Captured) -> None:
        self._c = captured
        self._observed = Observed(captured.runs)
        self._run = self._observed.smallest
        graph = captured.normal.graph
        # A value that is both a term and an output, or an output twice, is one node.
        self._ops = [node for node in graph.nodes if self._is_op(node)]
        self._known = set(self._ops)
        # A mean divided by the batch once more mixes nothing, but is no sum over micro-batches.
        self._coupled_terms = {t.node for t in captured.terms if t.reduction == "coupled"}
        self._fleeting = self._of_changing_state()

    def _is_op(self, node: fx.Node) -> bool:
        if node.op not in ("call_function", "call_module"):
            return False
        seen = self._run.nodes[node]
        return bool(seen.values) or seen.is_tuple

    def build(self) -> ModelGraph:
        c = self._c
        terms = c.terms
        counts = [term.count for term in terms if term.count is not None]
        sinks = {*(term.node for term in terms), *counts, *c.normal.values}
        changed = self._changed_state()
        grouped = groups(
            self._ops,
            self._run,
            [(term.node, term.count) for term in terms if term.count is not None],
        )
        unfit = {name for name, shape in c.shapes.items() if shape.requires_grad}
        unfit |= {n for n, t in c.tensors.items() if isinstance(t, nn.Parameter)}
        unfit |= {name for names in changed.values() for name in names}
        prep = prep_ops(
            self._ops, self._run, c.flow, c.shapes, unfit, grouped, sinks, self._is_random
        )
        keys = self._keys()
        ops = tuple(
            self._op(node, keys[node], grouped.get(node), node in prep, changed.get(node, ()))
            for node in self._ops
        )
        loss_terms = tuple(self._loss_term(term) for term in terms)
        program = self._program(counts)
        result = ModelGraph(
            name=c.name,
            training=c.training,
            inputs=tuple(self._inputs()),
            parameters=tuple(self._parameters()),
            ops=ops,
            loss_terms=loss_terms,
            batch_conditions=tuple(self._conditions()),
            outputs=tuple(node.name for node in c.normal.values),
            input_structure=_structure_text(c.signature.spec),
            output_structure=_structure_text(c.trace.output_spec),
            torch_version=torch.__version__,
            warnings=tuple(self._warnings(ops)),
        )
        result.attach_program(program)
        return result

    # Ops

    def _op(
        self,
        node: fx.Node,
        key: str,
        group: int | None,
        prep: bool,
        mutates: tuple[str, ...],
    ) -> Op:
        seen = self._run.nodes[node]
        origin = origin_of(node)
        target, _, _ = operator_of(node)
        flow = self._c.flow
        single = len(seen.values) == 1 and not seen.is_tuple
        return Op(
            name=node.name,
            target=_target_name(node, target),
            key=key,
            module=origin.module,
            source=origin.source,
            inputs=self._sources(node),
            parameters=self._read(node),
            mutates=mutates,
            output=self._observed.spec(node) if single else None,
            requires_grad=any(value.requires_grad for value in seen.values),
            prep=prep,
            coupled=node in flow.coupled
            or node in self._coupled_terms
            or self._follows_state(node),
            random=self._is_random(node),
            crossable=single and self._crossable(node),
            group=None if prep else group,
            forward=self._observed.work(node, "forward"),
            backward=self._observed.work(node, "backward"),
            saves=self._observed.saves(node),
        )

    def _sources(self, node: fx.Node) -> tuple[str, ...]:
        names = [
            source.name
            for source in node.all_input_nodes
            if source in self._known or source in self._c.normal.inputs
        ]
        return tuple(dict.fromkeys(names))

    def _read(self, node: fx.Node) -> tuple[str, ...]:
        names = [
            str(source.target)
            for source in node.all_input_nodes
            if source.op == "get_attr" and str(source.target) in self._c.tensors
        ]
        if node.op == "call_module":
            names += node.meta["parameters"]
        return tuple(dict.fromkeys(names))

    def _changed_state(self) -> dict[fx.Node, tuple[str, ...]]:
        """Buffers (or parameters) that each op's forward writes to."""
        owner: dict[int, str] = {}
        for node, seen in self._run.nodes.items():
            if node.op == "get_attr":
                for value in seen.values:
                    owner[value.storage] = str(node.target)
        result: dict[fx.Node, tuple[str, ...]] = {}
        for node in self._ops:
            names = [owner[s] for s in self._run.nodes[node].mutates if s in owner]
            if node.op == "call_module":
                names += [
                    name
                    for name in node.meta["parameters"]
                    if not isinstance(self._c.tensors[name], nn.Parameter)
                ]
            if names:
                result[node] = tuple(sorted(set(names)))
        return result

    def _of_changing_state(self) -> frozenset[fx.Node]:
        """Values without samples that follow a buffer which the forward changes.

        They are not the same for every micro-batch, as other values without samples are.
        """
        changed = {name for names in self._changed_state().values() for name in names}
        found: set[fx.Node] = set()
        for node in self._c.normal.graph.nodes:
            if node.op == "get_attr":
                if str(node.target) in changed:
                    found.add(node)
            elif any(source in found for source in node.all_input_nodes):
                flow = self._c.flow.flows.get(node)
                if flow is not None and not flow.batched:
                    found.add(node)
        return frozenset(found)

    def _follows_state(self, node: fx.Node) -> bool:
        """Whether samples meet a buffer that an earlier micro-batch may have changed."""
        flow = self._c.flow.flows.get(node)
        return (
            flow is not None
            and flow.batched
            and any(source in self._fleeting for source in node.all_input_nodes)
        )

    def _is_random(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return True
        target, args, kwargs = operator_of(node)
        if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
            return False
        given = dict(zip((a.name for a in target._schema.arguments), args, strict=False))
        given.update(kwargs)
        name = target._opname
        if name == "scaled_dot_product_attention":
            return bool(given.get("dropout_p", 0.0))
        if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            return bool(given.get("train")) and bool(given.get("dropout"))
        if name in ("rrelu", "rrelu_"):
            return bool(given.get("training"))
        return True

    def _crossable(self, node: fx.Node) -> bool:
        flow = self._c.flow.flows[node]
        if self._run.nodes[node].values[0].dtype not in DTYPE_BYTES or node in self._fleeting:
            return False
        if flow.power:
            # Scaled by the samples of this stage's micro-batch, which another stage does not know.
            return False
        return flow.kind is Kind.FREE or (
            flow.kind is Kind.ROWS and flow.dim == 0 and flow.outer == 1
        )

    def _keys(self) -> dict[fx.Node, str]:
        """``module@call:operator#n``: the n-th such op of that call of that module."""
        counters: dict[str, int] = {}
        keys: dict[fx.Node, str] = {}
        for node in self._ops:
            origin = origin_of(node)
            target, _, _ = operator_of(node)
            call = f"@{origin.call}" if origin.call else ""
            stem = f"{origin.module}{call}:{_target_name(node, target)}"
            counters[stem] = counters.get(stem, -1) + 1
            keys[node] = f"{stem}#{counters[stem]}"
        return keys

    # Everything else

    def _inputs(self) -> list[GraphInput]:
        result = []
        c = self._c
        for node, leaf in zip(c.normal.inputs, c.signature.tensors, strict=True):
            assert isinstance(leaf.value, torch.Tensor)
            shape: list[Expression] = list(leaf.value.shape)
            if leaf.rows:
                shape[0] = "b" if leaf.rows == 1 else f"{leaf.rows}*b"
            dtype = str(leaf.value.dtype).removeprefix("torch.")
            if dtype not in DTYPE_BYTES:
                raise CaptureError("An input has an unsupported dtype", where=leaf.path, got=dtype)
            spec = TensorSpec(shape=tuple(shape), dtype=dtype)
            result.append(
                GraphInput(name=node.name, path=leaf.path, spec=spec, per_sample=bool(leaf.rows))
            )
        return result

    def _parameters(self) -> list[Parameter]:
        c = self._c
        aliases: dict[int, list[str]] = {}
        fleeting: set[str] = set()
        for module, prefix in ((c.model, ""), (c.loss_fn, LOSS_PREFIX)):
            if module is None:
                continue
            for name, tensor in (
                *module.named_parameters(remove_duplicate=False),
                *module.named_buffers(remove_duplicate=False),
            ):
                aliases.setdefault(id(tensor), []).append(prefix + name)
            for path, child in module.named_modules():
                start = prefix + (f"{path}." if path else "")
                fleeting.update(start + name for name in child._non_persistent_buffers_set)
        result = []
        for name, tensor in c.tensors.items():
            others = tuple(alias for alias in aliases.get(id(tensor), []) if alias != name)
            kept = not name.startswith((CONSTANT_PREFIX, LOSS_PREFIX)) and name not in fleeting
            result.append(
                Parameter(
                    name=name,
                    shape=tuple(tensor.shape),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    trainable=isinstance(tensor, nn.Parameter) and tensor.requires_grad,
                    is_buffer=not isinstance(tensor, nn.Parameter),
                    persistent=kept,
                    aliases=others,
                )
            )
        return result

    def _loss_term(self, term: Term) -> LossTerm:
        from_inputs = term.count is not None and self._from_inputs(term.count)
        reduction = term.reduction
        assert reduction is not None
        return LossTerm(
            op=term.node.name,
            reduction=reduction,
            count_op=term.count.name if term.count is not None else None,
            count_from_inputs=from_inputs if term.count is not None else True,
            count_offset=term.offset,
            count_min=term.minimum,
            sign=term.sign,
        )

    def _conditions(self) -> Iterator[BatchCondition]:
        """Sizes that the Python code around an op refuses: one value per channel to normalise."""
        for node in self._ops:
            target, args, _ = operator_of(node)
            if target not in _NORMALISATIONS or not isinstance(args[0], fx.Node):
                continue
            if target is torch.ops.aten.batch_norm.default and not args[5]:
                continue
            shape = self._run.nodes[args[0]].values[0].shape
            values = math.prod(shape) // self._run.samples
            groups_or_channels = args[1] if _NORMALISATIONS[target] else shape[1]
            if self._c.flow.flows[args[0]].batched and values == groups_or_channels:
                yield BatchCondition(
                    op=node.name,
                    min_samples=2,
                    message="Expected more than 1 value per channel when training: a "
                    f"normalisation in {origin_of(node).module!r} cannot work on one sample",
                )

    def _from_inputs(self, node: fx.Node) -> bool:
        """Whether a value depends on graph inputs, constants and buffers that stay, alone."""
        changed = {name for names in self._changed_state().values() for name in names}
        stack, seen = [node], set()
        while stack:
            current = stack.pop()
            if current in seen:
                continue
            seen.add(current)
            if current.op == "call_module" or (current in self._known and self._is_random(current)):
                return False
            if current.op == "get_attr":
                tensor = self._c.tensors.get(str(current.target))
                if isinstance(tensor, nn.Parameter) or str(current.target) in changed:
                    return False
            stack.extend(current.all_input_nodes)
        return True

    def _program(self, counts: list[fx.Node]) -> Program:
        c = self._c
        graph = c.normal.graph
        graph.output((*(term.node for term in c.terms), *c.normal.values, *counts))
        root: dict[str, Any] = {**c.normal.modules}
        for node in graph.nodes:
            if node.op == "get_attr" and str(node.target) in c.tensors:
                root[str(node.target)] = c.tensors[str(node.target)]
        module = fx.GraphModule(
            root, graph, class_name=c.name if c.name.isidentifier() else "Model"
        )
        graph.lint()
        leaves = []
        lists = iter(c.normal.lists)
        for kind, value in c.trace.output_leaves:
            if kind == "value" and next(lists):
                kind = "samples"
            if isinstance(value, torch.SymInt):
                symbol = next(iter(value.node.expr.free_symbols))
                leaves.append(OutputLeaf("size", size=expression_of(value.node.expr, symbol)))
            else:
                leaves.append(OutputLeaf(kind, constant=value))  # type: ignore[arg-type]
        return Program(
            module=module,
            input_spec=c.signature.spec,
            output=OutputStructure(c.trace.output_spec, tuple(leaves)),
            constants=c.signature.constants,
            state=dict(c.tensors),
        )

    def _warnings(self, ops: tuple[Op, ...]) -> list[str]:
        result = []
        unknown = [node.name for node in self._c.flow.unknown]
        if unknown:
            result.append(
                f"These ops have no rule that says whether they mix samples, so they count as "
                f"mixing them: {_some(unknown)}. If they work sample by sample, name them in "
                "per_sample_ops."
            )
        coupled = [op for op in ops if op.coupled and not op.prep and op.name not in set(unknown)]
        if coupled:
            result.append(
                "The result depends on the micro-batch size, because these ops mix the samples "
                f"of a micro-batch: {_some([_described(op) for op in coupled])}. A stage that "
                "holds them equals full-batch training only if its micro-batch is the mini-batch."
            )
        if self._c.trace.lost:
            result.append(
                "The model returns objects that are no structure of tensors, which are None in "
                f"the outputs: {_some(list(self._c.trace.lost))}. Switch them off (such as "
                "use_cache=False), or register their class with torch.utils._pytree."
            )
        if self._observed.inexact:
            result.append(
                "The cost of these ops is no polynomial of the batch and is approximated by a "
                f"line: {_some(sorted(self._observed.inexact))}."
            )
        return result


def _described(op: Op) -> str:
    return f"{op.name} ({op.module})" if op.module else op.name


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _target_name(node: fx.Node, target: Any) -> str:
    if node.op == "call_module":
        return "opaque"
    if target is operator.getitem:
        return "getitem"
    return str(target)


def _structure_text(spec: pytree.TreeSpec) -> str:
    """The structure as JSON where torch can write it, else as text."""
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError, ValueError, AttributeError):
        return str(spec)
