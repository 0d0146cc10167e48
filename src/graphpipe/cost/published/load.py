"""Reading any of the known graph files."""

from __future__ import annotations

import os
from pathlib import Path

from graphpipe.cost.published.build import GraphFile
from graphpipe.cost.published.dnn_partitioning import CostUnit, read_dnn_partitioning
from graphpipe.cost.published.fields import Fields, parse_json
from graphpipe.cost.published.pipedream import SEPARATOR, read_pipedream
from graphpipe.cost.published.piper import PiperFile, TimeUnit, parse_piper, read_piper
from graphpipe.cost.published.plain import read_plain
from graphpipe.cost.table import ParameterMemory
from graphpipe.errors import FileFormatError

LARGEST_FILE = 512 * 2**20
"""Files beyond this many bytes are refused rather than read into memory."""


def load_graph_file(
    path: str | os.PathLike[str],
    *,
    profiled_batch: int | None = None,
    time_unit: TimeUnit | None = None,
    cost_unit: CostUnit | None = None,
    parameter_memory: ParameterMemory | None = None,
) -> GraphFile:
    """Reads a published profile or a plain cost graph; the format is found from the content.

    Args:
        path: PipeDream's ``graph.txt``, Piper's JSON, DNN-partitioning's JSON, or a plain
            cost graph (see the modules of these names).
        profiled_batch: PipeDream: samples of the mini-batch that was profiled.
        time_unit: Piper: unit of its times, ``s`` or ``ms``, where it cannot be guessed.
        cost_unit: DNN-partitioning: unit of the edges' costs, likewise.
        parameter_memory: Factors for gradients and optimizer state, instead of what the
            format says.

    Returns:
        Graph, costs in seconds and bytes per sample, and what the file says about devices
        and batch.

    Raises:
        FileFormatError: for anything malformed, naming the id and the field.
    """
    text, where = _read(path)
    name = Path(path).stem
    if _looks_like_pipedream(text):
        try:
            decoded = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise FileFormatError("The file is not UTF-8 text", where=where, got=error) from None
        return read_pipedream(
            decoded,
            name=name,
            where=where,
            profiled_batch=profiled_batch,
            parameter_memory=parameter_memory,
        )
    data = parse_json(text, where)
    if _is_piper(data):
        return read_piper(data, name=name, time_unit=time_unit, parameter_memory=parameter_memory)
    if any(key in data.values for key in ("maxFPGAs", "maxSizePerFPGA")):
        return read_dnn_partitioning(
            data, name=name, cost_unit=cost_unit, parameter_memory=parameter_memory
        )
    if isinstance(data.values.get("kind"), str):
        raise FileFormatError(
            "This file has no costs in it",
            where=where,
            expected="a published profile or a plain cost graph",
            got=f"a file of kind '{data.values['kind']}'",
        )
    return read_plain(data, parameter_memory=parameter_memory)


def load_piper_file(
    path: str | os.PathLike[str], *, time_unit: TimeUnit | None = None
) -> PiperFile:
    """Everything that a Piper JSON says: tensor-parallel degrees and recomputation too.

    Raises:
        FileFormatError: if it is malformed or not of Piper.
    """
    text, where = _read(path)
    data = parse_json(text, where)
    if not _is_piper(data):
        raise FileFormatError("This is not an input file of Piper", where=where)
    return parse_piper(data, time_unit=time_unit)


def _read(path: str | os.PathLike[str]) -> tuple[bytes, str]:
    try:
        if Path(path).stat().st_size > LARGEST_FILE:
            raise FileFormatError(
                "The graph file is too large",
                where=str(path),
                expected=f"at most {LARGEST_FILE} bytes",
            )
        return Path(path).read_bytes(), str(path)
    except OSError as error:
        raise FileFormatError(
            f"Cannot read the graph file: {error.strerror}", where=str(path)
        ) from None


def _looks_like_pipedream(text: bytes) -> bool:
    first = text.lstrip()[:1]
    return first not in (b"{", b"[") and SEPARATOR.encode() in text[:100_000]


def _is_piper(data: Fields) -> bool:
    return any(key in data.values for key in ("mbsInBatch", "maxBatchSize", "maxDevices"))
