"""PipeDream's ``graph.txt`` (Narayanan et al., SOSP 2019).

A node per line, ``ID -- DESCRIPTION -- key=value, ...``; an edge per line, a tab and
``SOURCE -- TARGET``. Times are milliseconds, sizes bytes, both of the whole mini-batch that
was profiled, whose size is not in the file: give it as ``profiled_batch`` (vgg16 and resnet50
were profiled with 128), else that mini-batch counts as one sample.

As in PipeDream's own optimiser, ``Input*`` sources weigh nothing (their time is the loading
of data) and ``__getitem__*`` sinks, outputs that nobody uses, are left out. What a node
keeps for its backward is its output. The file is silent about optimizer state: the default
is that of SGD with momentum, with which these models were trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphpipe.cost.published.build import MOST_SAMPLES, GraphDefaults, GraphFile, Node, build
from graphpipe.cost.published.fields import LARGEST, Fields
from graphpipe.cost.table import ParameterMemory
from graphpipe.errors import FileFormatError

SEPARATOR = " -- "
_TIMES = ("forward_compute_time", "backward_compute_time")
_SIZES = ("activation_size", "parameter_size")


@dataclass(frozen=True)
class _Line:
    id: str
    description: str
    forward: float
    backward: float
    activation: float
    parameter: float


def read_pipedream(
    text: str,
    *,
    name: str,
    where: str,
    profiled_batch: int | None = None,
    parameter_memory: ParameterMemory | None = None,
) -> GraphFile:
    """Reads a ``graph.txt``.

    Args:
        text: The file's text.
        name: Name of the graph.
        where: Name of the file, for messages.
        profiled_batch: Samples of the mini-batch that was profiled.
        parameter_memory: Factors for weights, gradients and optimizer state.

    Raises:
        FileFormatError: naming line or id, and the field.
    """
    batch = profiled_batch or 1
    if not 1 <= batch <= MOST_SAMPLES:
        raise FileFormatError(
            "Not a profiled batch", where=where, expected=f"1 to {MOST_SAMPLES}", got=batch
        )
    lines: list[_Line] = []
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"{where}, line {number}"
        if not line.strip():
            continue
        if line.startswith("\t"):
            edges.append(_edge(line, place))
        else:
            lines.append(_line(line, where, place))
    lines, edges, notes = _as_the_optimiser_sees_it(lines, edges)
    if profiled_batch is None:
        notes.append("the profiled mini-batch counts as one sample; its size is not in the file")
    nodes = [
        Node(
            id=line.id,
            name=line.description,
            forward=line.forward / 1e3 / batch,
            backward=line.backward / 1e3 / batch,
            parameter_bytes=line.parameter,
            saved_bytes=line.activation / batch,
            output_bytes=line.activation / batch,
        )
        for line in lines
    ]
    return build(
        name,
        nodes,
        edges,
        where=where,
        parameter_memory=parameter_memory or ParameterMemory.for_optimizer("sgd-momentum"),
        defaults=GraphDefaults(micro_batch=batch),
        notes=notes,
    )


def _as_the_optimiser_sees_it(
    lines: list[_Line], edges: list[tuple[str, str]]
) -> tuple[list[_Line], list[tuple[str, str]], list[str]]:
    """Weightless inputs, unused outputs left out, and remarks about both."""
    notes: list[str] = []
    has_source = {target for _, target in edges}
    has_target = {source for source, _ in edges}
    loading = 0.0
    kept: list[_Line] = []
    dropped: set[str] = set()
    for line in lines:
        if line.description.startswith("__getitem__") and line.id not in has_target:
            dropped.add(line.id)
            continue
        if line.description.startswith("Input") and line.id not in has_source:
            loading += line.forward
            line = replace(line, forward=0.0, backward=0.0, activation=0.0, parameter=0.0)
        kept.append(line)
    if loading:
        notes.append(f"{loading:g} ms of input nodes are the loading of data and left out")
    if dropped:
        notes.append(f"{len(dropped)} unused outputs are left out")
        edges = [edge for edge in edges if edge[1] not in dropped]
    return kept, edges, notes


def _edge(line: str, place: str) -> tuple[str, str]:
    parts = line.strip().split(SEPARATOR)
    if len(parts) != 2 or not all(part.strip() for part in parts):
        raise FileFormatError(
            "Not an edge", where=place, expected="a tab, SOURCE -- TARGET", got=repr(line)[:60]
        )
    return parts[0].strip(), parts[1].strip()


def _line(line: str, where: str, place: str) -> _Line:
    parts = line.strip().split(SEPARATOR)
    if len(parts) < 3 or not parts[0].strip():
        raise FileFormatError(
            "Not a node",
            where=place,
            expected="ID -- DESCRIPTION -- key=value, ...",
            got=repr(line)[:60],
        )
    identity = parts[0].strip()
    values: dict[str, object] = {}
    for item in parts[2].split(", "):
        key, equals, value = item.partition("=")
        if not equals or key.strip() in values:
            raise FileFormatError(
                "A value without a key, or a key that is there twice",
                where=f"{place}, node '{identity}'",
                got=repr(item)[:60],
            )
        values[key.strip()] = value.strip()
    for key in (*_TIMES, *_SIZES):
        if key in values:
            values[key] = _number(str(values[key]), several=key in _SIZES)
    fields = Fields(values, f"{where}, node '{identity}'")
    return _Line(
        identity,
        parts[1].strip(),
        *(fields.number(key) for key in _TIMES),
        *(fields.number(key) for key in _SIZES),
    )


def _number(text: str, *, several: bool) -> float | str:
    """The number, or the sum of ``[a; b; c]``; the text itself where it is none."""
    inner = text[1:-1].split(";") if several and text[:1] + text[-1:] == "[]" else [text]
    try:
        numbers = [float(part) for part in inner]
    except ValueError:
        return text
    if len(numbers) > 1 and not all(0 <= number <= LARGEST for number in numbers):
        return text
    return sum(numbers)
