"""Which source the initial values of a pipeline come from."""

from __future__ import annotations

from torch import nn

from graphpipe.runtime.slices import SlicedState, whole_values
from graphpipe.runtime.state import ModelState, SeededState, StateSource
from graphpipe.runtime.state_folder import state_at
from graphpipe.runtime.variant import Variant


def initial_values(
    model: nn.Module, first: Variant, state: str | None, init: str, seed: int
) -> StateSource:
    """Where the ranks' initial values come from; see ``Pipeline`` for the arguments."""
    values = whole_values(first.graph, first.program.state, model)
    source: StateSource = ModelState(values)
    if init == "model" and state is None:
        # Here and not where a rank makes its own, so that all ranks name the same parameter.
        for item in first.graph.parameters:
            if item.canonical in values and values[item.canonical].is_meta:
                source.tensor(item.canonical)
    if init == "seeded":
        source = SeededState(model, seed, values)
    if state is not None:
        source = state_at(
            state, source, {item.name: item.aliases for item in first.graph.parameters}
        )
    return SlicedState(source, first.graph) if first.graph.joins else source
