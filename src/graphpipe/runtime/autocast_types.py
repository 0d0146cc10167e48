"""What dtypes cross the stage boundaries when forwards run under ``torch.autocast``.

A plan is made from a capture without autocast. Under autocast a linear layer gives bf16 and
not fp32, so the tensors of the edges have other dtypes. They are found by running the
program once on fake tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.plan.stage import StageEdge
from graphpipe.runtime.rank_program import dtype_of

_SAMPLES = 2


def with_autocast_types(
    plan: Plan, graph: ModelGraph, device_type: str, dtype: torch.dtype
) -> Plan:
    """``plan`` with the dtypes that its edges have under autocast.

    Args:
        plan: A plan of ``graph``.
        graph: A captured graph.
        device_type: ``cpu`` or ``cuda``.
        dtype: The autocast dtype.
    """
    names = {tensor.name for edge in plan.edges for tensor in edge.tensors}
    found = _dtypes(graph, names, device_type, dtype)
    edges = tuple(
        StageEdge(
            source=edge.source,
            target=edge.target,
            tensors=tuple(
                tensor.model_copy(update={"dtype": found[tensor.name]}) for tensor in edge.tensors
            ),
        )
        for edge in plan.edges
    )
    fields = {name: getattr(plan, name) for name in Plan.model_fields}
    return Plan(**(fields | {"edges": edges}))


class _Recorder(fx.Interpreter):
    """Runs a program on fake tensors and keeps the dtypes of some nodes."""

    def __init__(self, module: fx.GraphModule, names: set[str], state: dict[str, Any]) -> None:
        super().__init__(module)
        self._names = names
        self._state = state
        self.dtypes: dict[str, str] = {}

    def fetch_attr(self, target: str) -> Any:
        value = self._state.get(target)
        return super().fetch_attr(target) if value is None else value

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self._names:
            self.dtypes[n.name] = str(value.dtype).removeprefix("torch.")
        return value


def _dtypes(
    graph: ModelGraph, names: set[str], device_type: str, dtype: torch.dtype
) -> dict[str, str]:
    assert graph.program is not None
    program = graph.program
    with FakeTensorMode(allow_non_fake_inputs=True):

        def fake(shape: Any, kind: torch.dtype) -> torch.Tensor:
            return torch.empty(tuple(shape), dtype=kind, device=device_type)

        state: dict[str, Any] = {
            name: torch.nn.Parameter(fake(value.shape, value.dtype), requires_grad=False)
            if isinstance(value, torch.nn.Parameter)
            else fake(value.shape, value.dtype)
            for name, value in program.state.items()
        }
        inputs = [
            fake(item.spec.concrete_shape(_SAMPLES), dtype_of(item.spec.dtype))
            for item in graph.inputs
        ]
        recorder = _Recorder(program.module, names, state)
        with torch.no_grad(), torch.autocast(device_type, dtype=dtype):
            recorder.run(_SAMPLES, *inputs)
    return recorder.dtypes
