"""Builds the module that one stage runs, from the program of the captured graph.

A stage module is an ``fx.GraphModule`` with ``forward(micro_batch_size, *tensors)`` that
returns a tuple. It holds only the parameters and buffers that its ops read, under the
model's own names. Prep ops (masks, position ids) and integers that other stages need too
are computed again inside, so that only real activations cross a stage boundary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from graphpipe.errors import RuntimeSetupError
from graphpipe.graph.devices import place_node_on
from graphpipe.graph.model_graph import BATCH_SIZE_INPUT
from graphpipe.graph.program import Program
from graphpipe.runtime.randomness import op_key, seed_op


def build_stage_module(
    program: Program,
    *,
    ops: Iterable[str],
    prep: Iterable[str],
    inputs: Sequence[str],
    outputs: Sequence[str],
    state: Mapping[str, torch.Tensor],
    device: torch.device | str = "cpu",
    random_keys: Mapping[str, str] | None = None,
    name: str = "Stage",
) -> fx.GraphModule:
    """One stage's module.

    Args:
        program: The whole model and loss.
        ops: Names of the stage's ops.
        prep: Names of the prep ops that the stage computes again for itself.
        inputs: Names of the graph inputs and of other stages' ops whose values are given, in
            the order of the arguments after ``micro_batch_size``.
        outputs: Names of the ops (or given inputs) whose values are returned, in this order.
        state: Parameters, buffers and constants by name, already on ``device``.
        device: Where ops that create tensors (``arange``, ``zeros``) put them.
        random_keys: Stable key of each random op by name: these ops are seeded (see
            :mod:`graphpipe.runtime.randomness`).
        name: Class name of the module, seen in tracebacks.

    Raises:
        RuntimeSetupError: if an op reads a value that is neither given nor computed here, or
            a parameter that ``state`` lacks.
    """
    keys = random_keys or {}
    graph = fx.Graph()
    copies: dict[str, fx.Node] = {BATCH_SIZE_INPUT: graph.placeholder(BATCH_SIZE_INPUT)}
    for item in inputs:
        copies[item] = graph.placeholder(item)
    wanted, free = set(ops), set(prep)
    known = {node.name: node for node in program.module.graph.nodes}
    missing = sorted((wanted | free) - set(known))
    if missing:
        raise RuntimeSetupError(
            f"The stage names ops that the captured model does not have: {', '.join(missing[:5])}",
            where=name,
            fix="Plan again with the graph of this model",
        )
    target = torch.device(device)
    root: dict[str, Any] = {}
    canonical = {id(tensor): key for key, tensor in program.state.items()}

    def value_of(key: str) -> torch.Tensor:
        if key not in state:
            raise RuntimeSetupError(f"No value is known for {key!r}", where=name)
        return state[key]

    def adopt(path: str) -> None:
        """Puts what a node names by ``path`` under the stage's root."""
        if path in root:
            return
        module = _submodule(program, path)
        if module is None:
            root[path] = value_of(path)
            return
        # The module itself, with this rank's tensors in the place of the model's.
        swaps = {id(t): value_of(canonical[id(t)]) for t in _tensors(module)}
        root[path] = copy.deepcopy(module, swaps)

    def convert(node: fx.Node) -> fx.Node:
        made = copies.get(node.name)
        if made is not None:
            return made
        known_here = node.op == "get_attr" or node.name in wanted or node.name in free
        if not known_here and not _is_integer(node):
            raise RuntimeSetupError(
                f"The stage reads {node.name!r}, which no stage sends to it", where=name
            )
        if node.op in ("get_attr", "call_module"):
            adopt(str(node.target))
        for source in node.all_input_nodes:
            convert(source)
        if node.name in keys:
            graph.call_function(seed_op, (op_key(keys[node.name]),))
        made = graph.node_copy(node, lambda source: copies[source.name])
        place_node_on(made, target)
        copies[node.name] = made
        return made

    # The program's own order keeps mutations and random ops where the model had them.
    for node in program.module.graph.nodes:
        if node.name in wanted:
            convert(node)
    results = tuple(copies[item] if item in copies else convert(known[item]) for item in outputs)
    graph.output(results)
    module = fx.GraphModule(dict(sorted(root.items())), graph, class_name=name)
    module.graph.lint()
    return module


def lift_state(module: fx.GraphModule) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """A stage module as a function of its inputs and its parameters and buffers.

    Reading ``self.decoder.blocks.0.norm.weight`` takes a microsecond or two, for every
    parameter of every task; an argument takes none.

    Returns:
        ``forward(micro_batch_size, *tensors, *state)``, and the names of ``state`` in order.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    lifted: dict[str, fx.Node] = {}
    nodes = list(module.graph.nodes)
    for node in nodes:
        if node.op == "placeholder":
            copies[node] = graph.placeholder(node.name)
    for node in nodes:
        if node.op == "get_attr" and _attribute(module, str(node.target)) is not None:
            target = str(node.target)
            if target not in lifted:
                lifted[target] = graph.placeholder(f"state_{len(lifted)}")
            copies[node] = lifted[target]
    for node in nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph, class_name=type(module).__name__).forward, tuple(lifted)


def _attribute(module: nn.Module, path: str) -> torch.Tensor | None:
    """The tensor of that path; None where the path names a module."""
    owner, _, leaf = path.rpartition(".")
    value = getattr(module.get_submodule(owner), leaf)
    return value if isinstance(value, torch.Tensor) else None


def state_names(program: Program, ops: Iterable[str], prep: Iterable[str]) -> tuple[str, ...]:
    """Names of the parameters, buffers and constants that these ops read, in program order."""
    wanted = set(ops) | set(prep)
    canonical = {id(tensor): key for key, tensor in program.state.items()}
    found: dict[str, None] = {}

    def read(path: str) -> None:
        module = _submodule(program, path)
        if module is None:
            found[path] = None
        else:
            found.update(dict.fromkeys(canonical[id(tensor)] for tensor in _tensors(module)))

    for node in program.module.graph.nodes:
        if node.name in wanted:
            if node.op == "call_module":
                read(str(node.target))
            for source in node.all_input_nodes:
                if source.op == "get_attr":
                    read(str(source.target))
    return tuple(found)


def _submodule(program: Program, path: str) -> nn.Module | None:
    """The module of that path; None where the path names a tensor."""
    try:
        return program.module.get_submodule(path)
    except AttributeError:
        return None


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _is_integer(node: fx.Node) -> bool:
    """Whether a node is arithmetic on the micro-batch size (every stage has that)."""
    return (
        node.op == "call_function"
        and all(
            source.name == BATCH_SIZE_INPUT or _is_integer(source)
            for source in node.all_input_nodes
        )
        and bool(node.all_input_nodes)
    )


def sparse_parameters(program: Program) -> set[str]:
    """Names of the parameters whose gradient is sparse: read by sparse embeddings only."""
    sparse: set[str] = set()
    dense: set[str] = set()
    for node in program.module.graph.nodes:
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                found = node.args[0] is source and _is_sparse_embedding(node)
                (sparse if found else dense).add(str(source.target))
    return sparse - dense


def _is_sparse_embedding(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target._schema.name not in ("aten::embedding", "aten::embedding_bag"):
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "sparse":
            given = node.args[position] if position < len(node.args) else None
            return bool(node.kwargs.get("sparse", given))
    return False
