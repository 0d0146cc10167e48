"""A call of a pipeline, before anything of it runs: inputs, variant, agreement of the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpipe.errors import GraphPipeError
from graphpipe.runtime.agreement import Agreement
from graphpipe.runtime.transport import Transport
from graphpipe.runtime.variant import Purpose, Variant
from graphpipe.runtime.variants import VariantCache


@dataclass(frozen=True)
class Call:
    """What is run.

    Attributes:
        variant: The variant of the graph that fits the inputs.
        leaves: Values of the graph inputs.
        samples: Of the mini-batch.
        agreement: Settled before the first message; None where one process runs all ranks.
    """

    variant: Variant
    leaves: Sequence[Any]
    samples: int
    agreement: Agreement | None


def bind_call(
    variants: VariantCache,
    transport: Transport,
    purpose: Purpose,
    args: Sequence[Any] | torch.Tensor,
    kwargs: Mapping[str, Any] | None,
    targets: Any,
    details: str,
) -> tuple[Call | None, Agreement | None]:
    """Binds the inputs to a variant of the graph, and begins to agree with the other ranks.

    Args:
        variants: The variants of the pipeline.
        transport: How this process reaches other ranks.
        purpose: What is run.
        args: Positional inputs.
        kwargs: Keyword inputs.
        targets: Targets.
        details: What else must be the same on every rank.

    Returns:
        The call; or, where this rank refuses it, None and the agreement that has to be settled,
        which raises the refusal on every rank.

    Raises:
        GraphPipeError: if the call is refused and there are no other processes.
    """
    alone = len(transport.ranks) == transport.world_size
    try:
        variant, leaves, samples = variants.bind(purpose, args, kwargs, targets)
        if purpose != "predict":
            variant.check_batch(samples)
    except GraphPipeError as error:
        if alone:
            raise
        return None, Agreement(transport.ranks[0], transport, f"{purpose}, {details}", error)
    if alone:
        return Call(variant, leaves, samples, None), None
    fingerprint = variant.graph.fingerprint
    called = f"{purpose} on {samples} samples, graph {fingerprint}, {details}"
    agreement = Agreement(transport.ranks[0], transport, called, None)
    return Call(variant, leaves, samples, agreement), None


def description(error: BaseException) -> str:
    """An error in one line: what others are told of it."""
    if isinstance(error, GraphPipeError):
        return str(error)
    return f"{type(error).__name__}: {error}"
