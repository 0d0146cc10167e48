"""Slices of parameters: where they come from, and how they become whole again.

Where a join was split, a rank holds column blocks of a weight
(:class:`~graphpipe.graph.model_graph.ParamSlice`). To everybody outside, the weight has its
one name and shape.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from graphpipe.graph.model_graph import ModelGraph, Parameter, ParamSlice
from graphpipe.graph.split_joins import split_joins
from graphpipe.plan.plan import Plan
from graphpipe.runtime.state import StateSource


def as_planned(graph: ModelGraph, plan: Plan) -> ModelGraph:
    """The graph with the joins split that the plan has split.

    Raises:
        GraphError: if one of them is not in this graph (another variant of the model), or
            something else reads its weight here.
    """
    if not plan.split_joins or graph.joins == plan.split_joins:
        return graph
    return split_joins(graph, plan.split_joins)


def take(whole: torch.Tensor, part: ParamSlice) -> torch.Tensor:
    """The view of a slice in the whole parameter."""
    return whole.narrow(part.dim, part.start, part.length)


def put(out: dict[str, torch.Tensor], item: Parameter, value: torch.Tensor) -> None:
    """Enters a value under every name that the parameter has; a slice in its place.

    Args:
        out: Tensors by name; the whole of a slice is made when the first one comes.
        item: What the value is.
        value: The value.
    """
    if item.slice is None:
        out.update(dict.fromkeys((item.name, *item.aliases), value))
        return
    if item.slice.of not in out:
        out[item.slice.of] = torch.empty(item.slice.full_shape, dtype=value.dtype)
    take(out[item.slice.of], item.slice).copy_(value)


def whole_values(
    graph: ModelGraph, state: Mapping[str, torch.Tensor], model: nn.Module
) -> Mapping[str, torch.Tensor]:
    """``state`` with the model's own whole tensors beside the slices of them."""
    cut = {item.slice.of for item in graph.parameters if item.slice is not None}
    own = {name: value for name, value in model.named_parameters() if name in cut}
    return {**state, **own}


class SlicedState:
    """Cuts slices out of the values of a source that knows whole parameters.

    Args:
        source: Knows the model's own names.
        graph: The graph, which lists the slices.
    """

    def __init__(self, source: StateSource, graph: ModelGraph) -> None:
        self._source = source
        self._parts = {item.name: item.slice for item in graph.parameters if item.slice}

    def tensor(self, name: str) -> torch.Tensor:
        """See :class:`~graphpipe.runtime.state.StateSource`."""
        part = self._parts.get(name)
        if part is None:
            return self._source.tensor(name)
        whole = self._source.tensor(part.of)
        return take(whole, part).clone(memory_format=torch.contiguous_format)
