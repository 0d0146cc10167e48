"""``Program``: the executable form of a captured graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import fx
    from torch.utils._pytree import TreeSpec


@dataclass(frozen=True, eq=False)
class Program:
    """What the runtime needs to build stage modules.

    Attributes:
        module: One ``fx.GraphModule`` for model and loss. Its first placeholder is
            ``micro_batch_size`` (an ``int``); no other node asks a tensor for the batch
            size. The other placeholders are named as the graph's inputs. Every op of the
            :class:`~graphpipe.graph.model_graph.ModelGraph` is the node of the same name;
            ``get_attr`` nodes name parameters and buffers by canonical name; integer nodes
            are arithmetic on ``micro_batch_size``. Its parameters are the user's own
            ``nn.Parameter`` objects. The output node returns (loss terms..., model outputs...).
        input_spec: Structure of ``(args, kwargs, targets)``.
        output_spec: Structure of the model's output; constants are kept in it.
        constants: Leaves of the inputs that are not tensors, by path; fixed by the capture.
    """

    module: fx.GraphModule
    input_spec: TreeSpec
    output_spec: TreeSpec | None
    constants: dict[str, object]
    state: dict[str, torch.Tensor]
