"""What stages are called: by the modules that they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from graphpipe.graph.model_graph import ModelGraph

_Path = tuple[str, ...]


def stage_names(
    graph: ModelGraph, stages: Sequence[Sequence[str]], given: Sequence[str] | None = None
) -> list[str]:
    """A name for each stage, all different.

    A stage that holds a whole module has the module's name; one that holds a part of it is
    named by the first and the last child that it holds, ``encoder.blocks.0..3``; one with
    ops of two modules that have nothing in common by both, ``image + text``, and one with
    more by the first and the last.

    Args:
        graph: The graph.
        stages: Names of each stage's ops, in any order. Prep ops count for nothing.
        given: Names to keep where they are not empty, one a stage; a number tells equal ones apart.
    """
    position = {op.name: index for index, op in enumerate(graph.ops) if not op.prep}
    whole = Counter(
        prefix for op in graph.ops if not op.prep for prefix in _prefixes(_path(op.module, op.name))
    )
    out: list[str] = []
    taken: set[str] = set()
    for index, ops in enumerate(stages):
        held = sorted(position[name] for name in ops if name in position)
        paths = [_path(graph.ops[i].module, graph.ops[i].name) for i in held]
        name = unique = (given[index] if given else "") or _name(paths, whole)
        number = 2
        while unique in taken:
            unique, number = f"{name} ({number})", number + 1
        taken.add(unique)
        out.append(unique)
    return out


def _path(module: str, op: str) -> _Path:
    return tuple((module or op).split("."))


def _prefixes(path: _Path) -> Iterator[_Path]:
    return (path[:length] for length in range(1, len(path) + 1))


def _name(paths: Sequence[_Path], whole: Counter[_Path]) -> str:
    if not paths:
        return "empty"
    shared = _shared(paths)
    if not shared:
        tops = list(dict.fromkeys(path[0] for path in paths))
        return " + ".join(tops) if len(tops) == 2 else f"{tops[0]}..{tops[-1]}"
    name = ".".join(shared)
    if whole[shared] == len(paths):
        return name
    children = [path[len(shared)] for path in paths if len(path) > len(shared)]
    first, last = (children[0], children[-1]) if children else ("", "")
    return f"{name}.{first}..{last}" if first != last else f"{name} (part)"


def _shared(paths: Iterable[_Path]) -> _Path:
    """The longest common beginning."""
    out: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        out.append(parts[0])
    return tuple(out)
