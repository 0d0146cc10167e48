"""Builds the module that one stage runs, from the program of the captured graph.

A stage module is an ``fx.GraphModule`` with ``forward(micro_batch_size, *tensors)`` that
returns a tuple. It holds only the parameters and buffers that its ops read, under the
model's own names. Prep ops (masks, position ids) and integers that other stages need too
are computed again inside, so that only real activations cross a stage boundary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphpipe.errors import RuntimeSetupError
from graphpipe.graph.model_graph import BATCH_SIZE_INPUT
from graphpipe.runtime.randomness import op_key, seed_op


def build_stage_module(
    program: fx.GraphModule,
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
        program: ``Program.module``: the whole model and loss; its first placeholder is the
            micro-batch size.
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
    wanted = set(ops)
    known = {node.name: node for node in program.graph.nodes}
    missing = sorted((wanted | set(prep)) - set(known))
    if missing:
        raise RuntimeSetupError(
            f"The stage names ops that the captured model does not have: {', '.join(missing[:5])}",
            where=name,
            fix="Plan again with the graph of this model",
        )
    free = set(prep)
    target = torch.device(device)

    def convert(node: fx.Node) -> fx.Node:
        made = copies.get(node.name)
        if made is not None:
            return made
        known_here = node.op == "get_attr" or node.name in wanted or node.name in free
        if not known_here and not _is_integer(node):
            raise RuntimeSetupError(
                f"The stage reads {node.name!r}, which no stage sends to it", where=name
            )
        if node.op == "get_attr" and node.target not in state:
            raise RuntimeSetupError(f"No value is known for {node.target!r}", where=name)
        for source in node.all_input_nodes:
            convert(source)
        if node.name in keys:
            graph.call_function(seed_op, (op_key(keys[node.name]),))
        made = graph.node_copy(node, lambda source: copies[source.name])
        _place(made, target)
        copies[node.name] = made
        return made

    # The program's own order keeps mutations and random ops where the model had them.
    for node in program.graph.nodes:
        if node.name in wanted:
            convert(node)
    results = tuple(copies[item] if item in copies else convert(known[item]) for item in outputs)
    graph.output(results)
    names = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    module = fx.GraphModule({key: state[key] for key in sorted(names)}, graph, class_name=name)
    module.graph.lint()
    return module


def state_names(
    program: fx.GraphModule, ops: Iterable[str], prep: Iterable[str]
) -> tuple[str, ...]:
    """Names of the parameters, buffers and constants that these ops read, in program order."""
    wanted = set(ops) | set(prep)
    found: dict[str, None] = {}
    for node in program.graph.nodes:
        if node.name in wanted:
            for source in node.all_input_nodes:
                if source.op == "get_attr":
                    found[str(source.target)] = None
    return tuple(found)


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


def _place(node: fx.Node, device: torch.device) -> None:
    """Puts what a creation op makes on the stage's device (a meta capture bakes in ``meta``)."""

    def swap(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    if node.op == "call_function":
        node.args = fx.node.map_aggregate(node.args, swap)
        node.kwargs = fx.node.map_aggregate(node.kwargs, swap)
