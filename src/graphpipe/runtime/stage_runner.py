"""Runs the tasks of one stage: forward, recomputation and backward of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn

from graphpipe.runtime.randomness import begin_task, generator_of
from graphpipe.runtime.stage_module import lift_state

Values = tuple[Any, ...]


class Kept:
    """What a micro-batch keeps from its forward to its backward.

    With recomputation ``values`` is empty until the backward, and ``buffers`` holds the values
    that the forward found in the buffers it changes.
    """

    __slots__ = ("arguments", "buffers", "values")

    def __init__(self, arguments: list[Any], values: Values, buffers: list[torch.Tensor]) -> None:
        self.arguments = arguments
        self.values = values
        self.buffers = buffers


class StageRunner:
    """One stage on one rank.

    Args:
        module: The stage's module (:mod:`graphpipe.runtime.stage_module`).
        has_backward: Whether gradients are computed at all.
        recompute: Keep only the arguments, and run the forward again before the backward.
        mutated: Names of the buffers that a forward changes.
        random: Whether an op of the stage draws random numbers.
        device: Where the stage runs.
        autocast: Makes a fresh autocast context, or None.
        call: What to call instead (a compiled form of the module); not with ``mutated``.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        *,
        has_backward: bool = True,
        recompute: bool = False,
        mutated: Sequence[str] = (),
        random: bool = False,
        device: torch.device | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] | None = None,
        call: Callable[..., Values] | None = None,
    ) -> None:
        self.module = module
        self.has_backward = has_backward
        self.recompute = recompute and has_backward
        self.mutated = tuple(mutated)
        self.random = random
        function, names = lift_state(module) if call is None else (call, ())
        self._call: Callable[..., Values] = function
        # What the forward is called with: parameters, and buffers as they are just now.
        self._state: list[torch.Tensor] = [_value(module, name) for name in names]
        self._places = [names.index(name) for name in mutated]
        # The tensors that the rank holds: between steps the forward uses these.
        self._own = self._buffers()
        self._generator = generator_of(device or torch.device("cpu"))
        self._autocast = autocast

    def forward(
        self, size: int, arguments: list[Any], seed: tuple[int, int, int], training: bool
    ) -> tuple[Values, Kept | None]:
        """The returned values of a micro-batch, and what its backward needs (None: nothing).

        Args:
            size: Samples of the micro-batch.
            arguments: Values in the order of the module's inputs; those that need a gradient
                are leaves that require one.
            seed: (seed, step, first sample), from which random ops are seeded.
            training: Whether a backward follows.
        """
        keep = training and self.has_backward
        before = self._take_buffers()
        with torch.set_grad_enabled(keep and not self.recompute):
            values = self._run(size, arguments, seed)
        if not keep:
            return values, None
        if self.recompute:
            return values, Kept(arguments, (), before)
        return values, Kept(arguments, values, [])

    def values_for_backward(self, kept: Kept, size: int, seed: tuple[int, int, int]) -> Values:
        """The values of the forward, connected to its arguments: run again where recomputed."""
        if not self.recompute:
            return kept.values
        # Only what the first run left counts: the second must not move the buffers again.
        now = self._buffers()
        self._set_buffers([value.clone() for value in kept.buffers])
        try:
            with torch.enable_grad():
                return self._run(size, kept.arguments, seed)
        finally:
            self._set_buffers(now)

    def commit_buffers(self) -> list[torch.Tensor]:
        """Ends a step: writes what the forwards left into the rank's own tensors; returns them."""
        with torch.no_grad():
            for own, value in zip(self._own, self._buffers(), strict=True):
                own.copy_(value)
        self._set_buffers(self._own)
        return self._own

    def discard_buffers(self) -> None:
        """Ends a step that failed: the forwards' changes are forgotten."""
        self._set_buffers(self._own)

    def _run(self, size: int, arguments: list[Any], seed: tuple[int, int, int]) -> Values:
        if self.random:
            begin_task(*seed, self._generator)
        if self._autocast is None:
            return self._call(size, *arguments, *self._state)
        with self._autocast():
            return self._call(size, *arguments, *self._state)

    def _take_buffers(self) -> list[torch.Tensor]:
        """The buffers that a forward changes; the stage goes on with copies of them.

        So what a micro-batch saved for its backward is never changed by the next one.
        """
        if not self._places:
            return []
        before = self._buffers()
        self._set_buffers([value.clone() for value in before])
        return before

    def _buffers(self) -> list[torch.Tensor]:
        return [self._state[place] for place in self._places]

    def _set_buffers(self, values: Sequence[torch.Tensor]) -> None:
        for place, value in zip(self._places, values, strict=True):
            self._state[place] = value


def _value(module: nn.Module, name: str) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    value = getattr(module.get_submodule(path), leaf)
    assert isinstance(value, torch.Tensor)
    return value
