"""What every op of a program is given at one micro-batch size, found without computing.

The program is run once on fake tensors. That yields, for every op, the exact shapes,
strides and dtypes of its arguments, and which values share memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from graphpipe.errors import CostError
from graphpipe.graph.autocast import operator_of
from graphpipe.graph.model_graph import BATCH_SIZE_INPUT, ModelGraph, Op
from graphpipe.graph.program import Program


@dataclass(frozen=True)
class TensorFact:
    """One tensor that an op reads or makes.

    Attributes:
        shape: Sizes.
        stride: Strides, in elements.
        dtype: Its dtype.
        requires_grad: Whether a gradient flows into it.
        state: Name of the parameter, buffer or constant that it is; "" for an activation.
        name: Name of the node whose value it is (the same tensor has the same name).
        root: Name of the node that made the memory that it lies in; with a number where the
            node makes several.
        root_bytes: Size of that memory.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    state: str
    name: str
    root: str
    root_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, eq=False)
class OpFacts:
    """One op at one micro-batch size.

    Attributes:
        op: The op.
        node: Its node in the program.
        arguments: (args, kwargs) with a :class:`TensorFact` in place of every tensor and
            numbers in place of the nodes of numbers.
        outputs: Facts of its tensors, in the order of the leaves.
    """

    op: Op
    node: fx.Node
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    outputs: tuple[TensorFact, ...]

    @property
    def tensors(self) -> list[TensorFact]:
        """Facts of the tensors among the arguments, in the order of the leaves."""
        leaves = pytree.tree_leaves(self.arguments)
        return [leaf for leaf in leaves if isinstance(leaf, TensorFact)]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that it reads and makes."""
        return sum(item.nbytes for item in (*self.tensors, *self.outputs))

    @property
    def is_view(self) -> bool:
        """Whether it only describes memory of its arguments anew, and neither reads nor writes."""
        target, _, _ = operator_of(self.node)
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return False
        roots = {item.root for item in self.tensors}
        return bool(self.outputs) and all(item.root in roots for item in self.outputs)

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for ops that do the same work: target, shapes, strides, constants, aliases."""
        leaves, spec = pytree.tree_flatten(self.arguments)
        roots: dict[str, int] = {}
        names: dict[str, int] = {}
        parts: list[object] = [str(self.node.target), self.node.op, str(spec)]
        for leaf in leaves:
            if isinstance(leaf, TensorFact):
                parts.append(
                    (
                        *(leaf.shape, leaf.stride, leaf.dtype, leaf.requires_grad),
                        bool(leaf.state),
                        roots.setdefault(leaf.root, len(roots)),
                        names.setdefault(leaf.name, len(names)),
                    )
                )
            elif isinstance(leaf, nn.Module):
                parts.append(id(leaf))
            else:
                parts.append((type(leaf).__name__, repr(leaf)))
        return tuple(parts)


def facts_at(graph: ModelGraph, micro_batch: int) -> dict[str, OpFacts]:
    """Facts of every op for a micro-batch of this many samples, by op name.

    Raises:
        CostError: if the graph has no program (it was read from a file).
    """
    program = program_of(graph)
    return _FakeRun(graph, program, micro_batch).facts()


def program_of(graph: ModelGraph) -> Program:
    """The program of a captured graph.

    Raises:
        CostError: if it has none.
    """
    if graph.program is None:
        raise CostError(
            "Only a graph captured in this process can be profiled; this one was read from a file",
            where=f"graph '{graph.name}'",
            fix="Capture the model again, or estimate the costs",
        )
    return graph.program


class _FakeRun:
    """Interprets the program on fake CPU tensors."""

    def __init__(self, graph: ModelGraph, program: Program, micro_batch: int) -> None:
        self._graph = graph
        self._program = program
        self._batch = micro_batch
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._values: dict[str, Any] = {}
        self._roots: dict[int, tuple[str, int]] = {}
        self._state: dict[str, torch.Tensor] = {}
        self._is_state: dict[int, str] = {}
        self._nodes = {node.name: node for node in program.module.graph.nodes}

    def facts(self) -> dict[str, OpFacts]:
        found: dict[str, OpFacts] = {}
        ops = self._graph.op_by_name
        with self._mode, torch.enable_grad():
            self._make_state()
            for node in self._program.module.graph.nodes:
                if node.op == "output":
                    continue
                if node.op == "placeholder":
                    self._values[node.name] = self._input(node.name)
                    self._note_roots(node)
                    continue
                if node.op == "get_attr":
                    self._values[node.name] = self._attribute(str(node.target))
                    continue
                args, kwargs = self._look_up((node.args, node.kwargs))
                op = ops.get(node.name)
                if op is not None:
                    arguments = self._described((node.args, node.kwargs))
                self._values[node.name] = self._run(node, op, args, kwargs)
                self._note_roots(node)
                if op is not None:
                    outputs = pytree.tree_leaves(self._describe_value(node))
                    tensors = tuple(leaf for leaf in outputs if isinstance(leaf, TensorFact))
                    found[node.name] = OpFacts(op, node, arguments, tensors)
        return found

    def _make_state(self) -> None:
        for name, tensor in self._program.state.items():
            known = self._graph.parameter_by_name.get(name)
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            if known is not None and known.trainable and tensor.dtype.is_floating_point:
                fake.requires_grad_(not known.is_buffer)
            self._state[name] = fake
            self._is_state[id(fake)] = name
            self._roots[_storage(fake)] = (name, fake.untyped_storage().nbytes())

    def _input(self, name: str) -> Any:
        if name == BATCH_SIZE_INPUT:
            return self._batch
        spec = self._graph.input_by_name[name].spec
        return torch.empty(spec.concrete_shape(self._batch), dtype=getattr(torch, spec.dtype))

    def _attribute(self, path: str) -> Any:
        if path in self._state:
            return self._state[path]
        return self._program.module.get_submodule(path)

    def _run(self, node: fx.Node, op: Op | None, args: Any, kwargs: Any) -> Any:
        try:
            if node.op == "call_module":
                return self._call_opaque(str(node.target), args, kwargs)
            assert callable(node.target)
            return node.target(*args, **kwargs)
        except Exception:
            # An op that needs real values: its outputs are those that the capture found.
            if op is None:
                raise
            return self._from_specs(op)

    def _call_opaque(self, path: str, args: Any, kwargs: Any) -> Any:
        module = self._program.module.get_submodule(path)
        canonical = {id(tensor): name for name, tensor in self._program.state.items()}
        own = (*module.named_parameters(), *module.named_buffers())
        swapped = {key: self._state[canonical[id(tensor)]] for key, tensor in own}
        return torch.func.functional_call(module, swapped, args, kwargs)

    def _from_specs(self, op: Op) -> Any:
        if op.output is not None:
            return self._empty(op)
        parts: dict[int, Any] = {}
        for position in self._graph.successors[self._graph.op_index[op.name]]:
            other = self._graph.ops[position]
            node = self._nodes[other.name]
            if node.args[0] is self._nodes[op.name] and isinstance(node.args[1], int):
                parts[node.args[1]] = self._empty(other)
        return tuple(parts.get(i) for i in range(max(parts, default=-1) + 1))

    def _empty(self, op: Op) -> Any:
        if op.output is None:
            return self._from_specs(op)
        spec = op.output
        value = torch.empty(spec.concrete_shape(self._batch), dtype=getattr(torch, spec.dtype))
        return value.requires_grad_(spec.requires_grad and value.dtype.is_floating_point)

    def _look_up(self, arguments: Any) -> Any:
        return fx.node.map_arg(arguments, lambda node: self._values[node.name])

    def _note_roots(self, node: fx.Node) -> None:
        for i, leaf in enumerate(pytree.tree_leaves(self._values[node.name])):
            if isinstance(leaf, torch.Tensor) and not leaf.is_sparse:
                name = node.name if i == 0 else f"{node.name}.{i}"
                self._roots.setdefault(_storage(leaf), (name, leaf.untyped_storage().nbytes()))

    def _described(self, arguments: Any) -> Any:
        return fx.node.map_arg(arguments, self._describe_value)

    def _describe_value(self, node: fx.Node) -> Any:
        leaves, spec = pytree.tree_flatten(self._values[node.name])
        described = [
            self._describe(leaf, node.name if len(leaves) == 1 else f"{node.name}.{i}")
            for i, leaf in enumerate(leaves)
        ]
        return pytree.tree_unflatten(described, spec)

    def _describe(self, value: Any, name: str) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        root, size = self._roots[_storage(value)]
        return TensorFact(
            shape=tuple(value.shape),
            stride=tuple(value.stride()),
            dtype=value.dtype,
            requires_grad=value.requires_grad,
            state=self._is_state.get(id(value), ""),
            name=name,
            root=root,
            root_bytes=size,
        )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
