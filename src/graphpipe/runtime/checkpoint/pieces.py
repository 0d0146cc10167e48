"""The tensors of a rank as pieces of the model's tensors, for saving and for loading."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from graphpipe.graph.model_graph import ModelGraph, Parameter
from graphpipe.runtime.checkpoint.index import Section
from graphpipe.runtime.worker import Worker


@dataclass(frozen=True, eq=False)
class Piece:
    """A block of a tensor of the checkpoint, in memory.

    Attributes:
        section: See :data:`~graphpipe.runtime.checkpoint.index.Section`.
        name: Canonical name of the parameter or buffer.
        key: What of the optimizer's state of the parameter; else empty.
        whole: Shape of the whole tensor.
        offsets: Of the block in it.
        tensor: The block.
    """

    section: Section
    name: str
    key: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def label(self) -> str:
        """As :attr:`TensorEntry.label`."""
        return f"{self.section}:{self.key}:{self.name}"

    @property
    def file_key(self) -> str:
        """Its name in a file: that of the tensor, with the block's place if it is not whole."""
        text = f"{self.name}/{self.key}" if self.key else self.name
        if tuple(self.tensor.shape) == self.whole:
            return text
        return f"{text}@{','.join(map(str, self.offsets))}"


@dataclass(frozen=True)
class Place:
    """Where a tensor of a worker belongs in the model.

    Attributes:
        name: Canonical name.
        whole: Shape of the parameter.
        offsets: Of the worker's block in it.
    """

    name: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]


def place_of(item: Parameter) -> Place:
    """Where a tensor that the graph lists belongs in the model."""
    part = getattr(item, "slice", None)
    if part is None:
        return Place(item.name, tuple(item.shape), (0,) * len(item.shape))
    offsets = [0] * len(part.full_shape)
    offsets[part.dim] = part.start
    return Place(part.of, tuple(part.full_shape), tuple(offsets))


def state_pieces(worker: Worker, graph: ModelGraph) -> Iterator[tuple[str, Piece]]:
    """The parameters and buffers of a worker, each with its key in the worker's state."""
    for key, value in worker.state.items():
        item = graph.parameter_by_name[key]
        place = place_of(item)
        section: Section = "model" if item.persistent else "buffer"
        yield key, Piece(section, place.name, "", place.whole, place.offsets, value.detach())


def optimizer_pieces(worker: Worker, graph: ModelGraph, keys: Collection[str]) -> Iterator[Piece]:
    """The tensors that the optimizer keeps, a block where the parameter is one.

    Args:
        worker: The worker.
        graph: The graph of its model.
        keys: Those of the worker's state whose optimizer state is wanted.
    """
    if worker.optimizer is None:
        return
    for key, parameter in worker.parameters.items():
        kept = worker.optimizer.state.get(parameter)
        if key not in keys or not kept:
            continue
        place = place_of(graph.parameter_by_name[key])
        for what, value in kept.items():
            if not isinstance(value, torch.Tensor):
                continue
            if value.shape == parameter.shape and value.dim():
                whole, offsets = place.whole, place.offsets
            elif any(place.offsets):
                continue  # the same for every block: the first one's is saved
            else:
                whole, offsets = tuple(value.shape), (0,) * value.dim()
            yield Piece("optimizer", place.name, what, whole, offsets, value.detach())
