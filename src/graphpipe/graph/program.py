"""``Program``: the executable form of a captured graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from graphpipe.graph.expression import Expression, evaluate

if TYPE_CHECKING:
    import torch
    from torch import fx
    from torch.utils._pytree import TreeSpec


@dataclass(frozen=True)
class OutputLeaf:
    """One leaf of the model's output.

    Attributes:
        kind: ``value``: the next of the graph's outputs; ``samples``: likewise, but the model
            returns a list with one tensor for each sample; ``loss``: the mini-batch's loss,
            where the model itself returns it; ``constant``: the same for every call;
            ``size``: an integer that depends on the number of samples.
        constant: The value of a constant.
        size: The expression of a size.
    """

    kind: Literal["value", "samples", "loss", "constant", "size"]
    constant: object = None
    size: Expression = 0


@dataclass(frozen=True, eq=False)
class OutputStructure:
    """How the model's output is put together again from its tensors."""

    spec: TreeSpec
    leaves: tuple[OutputLeaf, ...]

    def restore(self, values: Sequence[object], *, samples: int, loss: object = None) -> object:
        """The output as the model returns it.

        Args:
            values: One value for each of ``ModelGraph.outputs``, in that order.
            samples: Samples in these values, for sizes that the model returns.
            loss: The value to put where the model returns its loss.
        """
        from torch.utils._pytree import tree_map, tree_unflatten

        remaining: Iterator[Any] = iter(values)
        leaves: list[object] = []
        for leaf in self.leaves:
            match leaf.kind:
                case "value":
                    leaves.append(next(remaining))
                case "samples":
                    leaves.append(_EverySample(tuple(next(remaining).chunk(samples))))
                case "loss":
                    leaves.append(loss)
                case "constant":
                    leaves.append(leaf.constant)
                case "size":
                    leaves.append(evaluate(leaf.size, samples))
        return tree_map(_spread, tree_unflatten(leaves, self.spec), is_leaf=_is_list_of_samples)


@dataclass(frozen=True)
class _EverySample:
    """The tensors of all samples, in the place of the one list item that the trace has."""

    tensors: tuple[object, ...]


def _is_list_of_samples(tree: object) -> bool:
    return isinstance(tree, (list, tuple)) and len(tree) == 1 and isinstance(tree[0], _EverySample)


def _spread(leaf: object) -> object:
    if _is_list_of_samples(leaf):
        assert isinstance(leaf, (list, tuple))
        return type(leaf)(leaf[0].tensors)
    return leaf


@dataclass(frozen=True, eq=False)
class Program:
    """What the runtime needs to build stage modules.

    Attributes:
        module: One ``fx.GraphModule`` for model and loss. Its first placeholder is
            ``micro_batch_size`` (an ``int``); no other node asks a tensor for the batch
            size. The other placeholders are named as the graph's inputs, in that order.
            Every op of the :class:`~graphpipe.graph.model_graph.ModelGraph` is the node of
            the same name; ``get_attr`` nodes name parameters, buffers and constants by
            canonical name (or, rarely, the sub-graph of a higher-order op); the nodes that
            are neither are numbers: arithmetic on ``micro_batch_size``. A ``call_module``
            node is an opaque module. Its parameters are the user's own ``nn.Parameter``
            objects. The output node returns (loss terms..., model outputs..., counts of
            the loss terms that have one...). Devices in it are the CPU;
            :func:`graphpipe.graph.devices.place_on` sets another.
        input_spec: Structure of ``(args, kwargs, targets)``.
        output: Structure of the model's output.
        constants: Leaves of the inputs that are not tensors, by path; fixed by the capture.
        state: Parameters, buffers and lifted constants by canonical name.
    """

    module: fx.GraphModule
    input_spec: TreeSpec
    output: OutputStructure
    constants: dict[str, object]
    state: dict[str, torch.Tensor]
