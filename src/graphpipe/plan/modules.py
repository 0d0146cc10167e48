"""Which modules of the model a stage holds, in the fewest words."""

from __future__ import annotations

from collections.abc import Collection

from graphpipe.graph.model_graph import ModelGraph


def modules_of(graph: ModelGraph, ops: Collection[str]) -> tuple[str, ...]:
    """The shortest list of module paths that tells what ``ops`` are, in the graph's order.

    A module whose ops all lie in ``ops`` is named once, without its children; one that is
    cut between stages is named by the children that are whole, and by ``path (part)`` for
    ops that belong to no such child. Ops outside of every module are not mentioned. Prep
    ops count for nothing, because every stage that needs one has it.

    Raises:
        KeyError: if ``ops`` names an op that the graph does not have.
    """
    inside = set(ops)
    total: dict[tuple[str, ...], int] = {}
    held: dict[tuple[str, ...], int] = {}
    for op in graph.ops:
        if op.prep:
            continue
        for path in _prefixes(op.module):
            total[path] = total.get(path, 0) + 1
            held[path] = held.get(path, 0) + (op.name in inside)
    whole = {path for path in total if path and held[path] == total[path]}
    names: dict[str, None] = {}
    order = [graph.op_by_name[name] for name in ops]
    position = {op.name: index for index, op in enumerate(graph.ops)}
    for op in sorted(order, key=lambda op: position[op.name]):
        if not op.module or op.prep:
            continue
        complete = next((path for path in _prefixes(op.module) if path in whole), None)
        names[".".join(complete) if complete else f"{op.module} (part)"] = None
    return tuple(names)


def _prefixes(module: str) -> list[tuple[str, ...]]:
    parts = tuple(module.split(".")) if module else ()
    return [parts[:length] for length in range(len(parts) + 1)]
