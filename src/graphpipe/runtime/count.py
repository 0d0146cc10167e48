"""Counts that the inputs alone decide, such as the number of tokens that are not padding.

They are needed before the first backward, because every micro-batch of the loss is divided
by the count of the whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphpipe.plan.ranges import SampleRange
from graphpipe.runtime.losses import ancestors
from graphpipe.runtime.stage_module import build_stage_module, state_names
from graphpipe.runtime.variant import Variant


class CountRunner:
    """Computes the count of one loss term, micro-batch by micro-batch.

    Args:
        variant: The graph and its program.
        name: The count's op; it depends on graph inputs only.
        device: Where it is computed.
    """

    def __init__(self, variant: Variant, name: str, device: torch.device) -> None:
        graph = variant.graph
        ops = ancestors(graph, [name])
        read = {source for op in ops for source in graph.op_by_name[op].inputs}
        self._inputs = [item for item in graph.inputs if item.name in read]
        self._numbers = [variant.leaf_numbers[item.name] for item in self._inputs]
        program = variant.program
        names = state_names(program, ops, [])
        self._module = build_stage_module(
            program,
            ops=ops,
            prep=[],
            inputs=[item.name for item in self._inputs],
            outputs=[name],
            state={key: program.state[key].to(device) for key in names},
            device=device,
            name="Count",
        )

    def count(self, leaves: Sequence[Any], samples: SampleRange) -> float:
        """The count of these samples."""
        arguments: list[torch.Tensor] = []
        for item, number in zip(self._inputs, self._numbers, strict=True):
            value = leaves[number]
            if item.per_sample:
                rows = item.spec.rows_per_sample or 1
                value = value.narrow(0, samples.start * rows, len(samples) * rows)
            arguments.append(value)
        with torch.no_grad():
            (found,) = self._module.forward(len(samples), *arguments)
        return float(found)
