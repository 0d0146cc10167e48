"""A two-tower graph made by hand, with its costs."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphpipe.cost.table import CostTable, DeviceCosts, ParameterMemory
from graphpipe.graph.model_graph import (
    GraphInput,
    LossTerm,
    ModelGraph,
    Op,
    Parameter,
    TensorSpec,
)


def tensor(width: int, *, gradient: bool = True, rows: str = "b") -> TensorSpec:
    return TensorSpec(shape=(rows, width), dtype="float32", requires_grad=gradient)


def two_towers(**changes: dict[str, Any]) -> ModelGraph:
    """image -> i1 -> i2 and text -> t1 -> t2 meet in join -> loss; mask is a prep op.

    Args:
        changes: By name of an op, fields to set on it.
    """
    ops: list[dict[str, Any]] = [
        {"name": "mask", "inputs": ("text",), "output": tensor(1, gradient=False), "prep": True},
        {"name": "i1", "inputs": ("image",), "parameters": ("i1.w",), "output": tensor(8)},
        {"name": "i2", "inputs": ("i1",), "parameters": ("i2.w",), "output": tensor(4)},
        {"name": "t1", "inputs": ("text", "mask"), "parameters": ("t1.w",), "output": tensor(2)},
        {"name": "t2", "inputs": ("t1", "mask"), "parameters": ("t2.w",), "output": tensor(4)},
        {"name": "join", "inputs": ("i2", "t2"), "parameters": ("join.w",), "output": tensor(4)},
        {
            "name": "loss",
            "inputs": ("join", "label"),
            "output": TensorSpec(shape=(), dtype="float32", requires_grad=True),
            "crossable": False,
        },
    ]
    records = []
    for op in ops:
        fields = {
            "target": "toy",
            "key": op["name"],
            "module": {"i": "image", "t": "text"}.get(op["name"][0], op["name"]),
            "requires_grad": not op.get("prep", False),
        }
        records.append(Op(**{**fields, **op, **changes.get(op["name"], {})}))
    return ModelGraph(
        name="two towers",
        inputs=tuple(
            GraphInput(name=name, path=path, spec=tensor(width, gradient=False))
            for name, path, width in (
                ("image", "args[0]", 16),
                ("text", "args[1]", 8),
                ("label", "targets", 1),
            )
        ),
        parameters=tuple(
            Parameter(name=f"{name}.w", shape=(width,), dtype="float32")
            for name, width in (("i1", 10), ("i2", 20), ("t1", 30), ("t2", 40), ("join", 50))
        ),
        ops=tuple(records),
        loss_terms=(LossTerm(op="loss", reduction="mean"),),
    )


def costs_of(graph: ModelGraph, *, kinds: tuple[str, ...] = ("toy",)) -> CostTable:
    """1 us forward and 2 us backward for each op and sample, twice on the second kind.

    Outputs have their true bytes; each op that is not prep keeps 10 bytes and 32 a sample.
    """
    sizes = (1, 2, 4, 8, 16)
    ones = np.array([0.0 if op.prep else 1.0 for op in graph.ops])
    output = np.zeros((len(ones), 2))
    for row, op in enumerate(graph.ops):
        if op.output is not None:
            per_sample = op.output.nbytes(2) - op.output.nbytes(1)
            output[row] = (op.output.nbytes(1) - per_sample, per_sample)
    time = np.outer(ones, np.array(sizes)) * 1e-6
    return CostTable(
        fingerprint=graph.fingerprint,
        source="analytic",
        ops=tuple(op.name for op in graph.ops),
        micro_batches=sizes,
        devices={
            kind: DeviceCosts(time * (k + 1), 2 * time * (k + 1), optimizer_seconds_per_byte=1e-9)
            for k, kind in enumerate(kinds)
        },
        output_bytes=output,
        gradient_bytes=output * np.array([[op.requires_grad] for op in graph.ops]),
        storages=np.array([[10.0, 32.0]] * len(ones)) * ones[:, None],
        saved=tuple((row,) if one else () for row, one in enumerate(ones)),
        workspace_bytes=np.array([[5.0, 1.0]] * len(ones)),
        parameter_memory=ParameterMemory(1.0, 1.0, 2.0),
    )
