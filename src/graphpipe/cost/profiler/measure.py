"""Measures one op: forward and backward apart, what it keeps, and its peak."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphpipe.cost.profiler.evict import Evictor
from graphpipe.cost.profiler.facts import OpFacts
from graphpipe.cost.profiler.heap import Heap
from graphpipe.cost.profiler.inputs import UNCACHED_BYTES, Arguments, runner
from graphpipe.cost.profiler.timing import Clock, Timing
from graphpipe.graph.autocast import operator_of

SLOW_BANDWIDTH = 5e9
"""Bytes per second that any memory reaches."""
MOST_FIXED = 0.05
"""Share of an op's time at which its parameters' part of it no longer matters."""
TOGETHER_BYTES = 256 * 2**20
"""Repeats run side by side while their tensors stay below this size in all."""


@dataclass(frozen=True)
class Saved:
    """One piece of memory that an op keeps for its backward.

    Attributes:
        kind: ``input`` or ``output`` (memory of the argument or result number ``index``, in
            the order of the leaves), or ``internal`` (its own).
        index: Which one.
        nbytes: Its size, for ``internal``.
    """

    kind: str
    index: int
    nbytes: int = 0


@dataclass(frozen=True)
class OpMeasurement:
    """What was measured of one op at one size.

    Attributes:
        forward: One forward.
        backward: One backward, without accumulation into ``.grad``.
        saved: What it keeps.
        workspace: Bytes beyond arguments and results at the peak; -1 where unknown.
    """

    forward: Timing
    backward: Timing
    saved: tuple[Saved, ...] = ()
    workspace: int = -1


@dataclass
class Budget:
    """How often an op is repeated.

    Attributes:
        seconds: Time for the repeats of one op at one size, in each of two rounds over all ops.
        most: At most so many repeats, after the warm-up.
        least: At least so many.
        long: An op that takes this many seconds is repeated once, and its warm-up counts.
        longest: An op that would take longer than this is not run where its time per sample was
            the same at the two sizes before: it then grows in proportion. One that took longer
            than this is not repeated, and grows in proportion from there on if little of that
            time can be due to its parameters, whose size is the same for every micro-batch.
        again: An op that takes longer than this, or whose tensors exceed a quarter of
            :data:`TOGETHER_BYTES`, is left out of the second round, whose point is
            that the whole machine may have been slow during the first.
    """

    seconds: float = 0.015
    most: int = 6
    least: int = 2
    again: float = 0.03
    long: float = 0.06
    longest: float = 0.25

    def repeats(self, once: float) -> int:
        """Repeats of something that takes ``once`` seconds."""
        if once > self.longest:
            return 0  # the warm-up is the measurement
        if once > self.long:
            return 1
        return max(self.least, min(self.most, int(self.seconds / max(once, 1e-9))))


@dataclass
class Meter:
    """Measures ops on one device.

    Attributes:
        device: Where.
        evictor: Makes caches as cold as the rest of the model would.
        budget: How often.
        heap: Keeps memory mapped.
    """

    device: torch.device
    evictor: Evictor
    budget: Budget = field(default_factory=Budget)
    heap: Heap | None = None

    def __post_init__(self) -> None:
        self.clock = Clock(self.device)
        self.heap = self.heap or Heap(self.device)
        self._call_overhead = self._engine_overhead()

    def measure(self, facts: OpFacts) -> OpMeasurement:
        """Measures one op.

        Raises:
            torch.OutOfMemoryError: if it does not fit.
        """
        self._check_memory(facts)
        call = runner(facts, self.device)
        arguments = Arguments(facts, self.device, inplace=changes_first_argument(facts))
        assert self.heap is not None
        self.heap.warm(0 if facts.is_view else 4 * facts.nbytes)
        with torch.enable_grad():
            first, saved, workspace = self._warm_up(facts, call, arguments)
            return self._repeat(facts, call, arguments, first, saved, workspace)

    def again(self, facts: OpFacts, before: OpMeasurement) -> OpMeasurement:
        """Measures an op in a second round and returns both together."""
        call = runner(facts, self.device)
        arguments = Arguments(facts, self.device, inplace=changes_first_argument(facts))
        with torch.enable_grad():
            first = (before.forward.seconds, before.backward.seconds)
            found = self._repeat(facts, call, arguments, first, before.saved, before.workspace)
        return replace(
            found,
            forward=before.forward.merged(found.forward),
            backward=before.backward.merged(found.backward),
        )

    def _repeat(
        self,
        facts: OpFacts,
        call: Any,
        arguments: Arguments,
        first: tuple[float, float],
        saved: tuple[Saved, ...],
        workspace: int,
    ) -> OpMeasurement:
        size = max(1, facts.nbytes)
        copies = self.budget.repeats(sum(first))
        together = max(1, min(copies, TOGETHER_BYTES // size))
        forward: list[float] = []
        backward: list[float] = []
        if sum(first) > self.budget.long:
            forward.append(first[0])
            backward += [first[1]] if first[1] else []
        gradients: list[torch.Tensor] = []
        assert self.heap is not None
        # Copies of arguments, results and what they keep, and the gradients of one repeat.
        self.heap.warm(0 if facts.is_view else (2 * together + 2) * size)
        while copies > 0:
            # All forwards first: what a backward reads is then as cold as in training.
            group = [arguments.make() for _ in range(min(together, copies))]
            copies -= len(group)
            done: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
            self.evictor.evict()
            for args, kwargs, wanted in group:
                self.evictor.touch(_activations(args, kwargs, facts))
                seconds, result = self.clock.time(lambda a=args, k=kwargs: call(*a, **k))  # type: ignore[misc]
                forward.append(seconds)
                done.append((_with_gradient(result), wanted))
                del result
            del group
            self.evictor.evict()
            for outputs, wanted in done:
                if outputs and wanted:
                    gradients = gradients or self._gradients(facts, outputs)
                    self.evictor.touch(gradients)
                    seconds, _ = self.clock.time(
                        lambda o=outputs, w=wanted, g=gradients: torch.autograd.grad(  # type: ignore[misc]
                            o, w, g, allow_unused=True
                        )
                    )
                    backward.append(seconds)
        return OpMeasurement(
            Timing.of(forward),
            Timing.of(backward).less(self._call_overhead),
            saved,
            workspace,
        )

    def _warm_up(
        self, facts: OpFacts, call: Any, arguments: Arguments
    ) -> tuple[tuple[float, float], tuple[Saved, ...], int]:
        """A first forward and backward: their seconds, what is kept, the peak."""
        args, kwargs, wanted = arguments.make()
        given = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        packed: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor)
            return tensor

        before = self._reset_peak()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            seconds, result = self.clock.time(lambda: call(*args, **kwargs))
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        saved = _classified(packed, given, results, facts)
        packed.clear()
        outputs = _with_gradient(result)
        back = 0.0
        if outputs and wanted:
            gradients = self._gradients(facts, outputs)
            back, _ = self.clock.time(
                lambda: torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
            )
        made = sum(item.nbytes for item in facts.outputs)
        peak = self._peak()
        return (seconds, back), saved, max(0, peak - before - made) if peak >= 0 else -1

    @staticmethod
    def _gradients(facts: OpFacts, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Made-up gradients; a view hands its gradient on without reading it."""
        make = torch.empty_like if facts.is_view else torch.ones_like
        return [make(item) for item in outputs]

    def _reset_peak(self) -> int:
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def _peak(self) -> int:
        """Peak bytes since the reset; -1 where the allocator does not tell."""
        if self.device.type != "cuda":
            return -1
        return torch.cuda.max_memory_allocated(self.device)

    def _check_memory(self, facts: OpFacts) -> None:
        """A CPU overcommits and the process is then killed: refuse beforehand."""
        if self.device.type == "cuda":
            return
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        needed = 3 * facts.nbytes
        if needed > free:
            raise torch.OutOfMemoryError(f"out of memory: {needed} bytes needed, {free} free")

    def _engine_overhead(self) -> float:
        """Seconds that a call of the autograd engine takes by itself."""
        x = torch.ones(1, device=self.device, requires_grad=True)
        gradient = torch.ones(1, device=self.device)
        times = []
        with torch.enable_grad():
            for _ in range(30):
                y = x.view(1)
                times.append(self.clock.time(lambda: torch.autograd.grad(y, x, gradient))[0])  # noqa: B023
        return min(times)

    def add(self, shape: tuple[int, ...], dtype: torch.dtype) -> Timing:
        """The sum of two gradients of one tensor, into memory of its own."""
        return self._pointwise(shape, dtype, inplace=False)

    def accumulate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Timing:
        """Adding a gradient into ``.grad``."""
        return self._pointwise(shape, dtype, inplace=True)

    def _pointwise(self, shape: tuple[int, ...], dtype: torch.dtype, *, inplace: bool) -> Timing:
        times: list[float] = []
        with torch.no_grad():
            base = torch.full(shape, 0.5, dtype=dtype, device=self.device)
            other = torch.full_like(base, 0.25)
            if base.nbytes > UNCACHED_BYTES:
                pairs = [(base, other)] * 3
            else:
                pairs = [(base.clone(), other.clone()) for _ in range(4)]
            assert self.heap is not None
            self.heap.warm(3 * base.nbytes)
            self.evictor.evict()
            for left, right in pairs:
                # A gradient that was just computed; the sum so far waits in memory.
                self.evictor.touch([right] if inplace else [left, right])
                if inplace:
                    seconds, _ = self.clock.time(lambda a=left, b=right: a.add_(b))  # type: ignore[misc]
                else:
                    seconds, _ = self.clock.time(lambda a=left, b=right: a + b)  # type: ignore[misc]
                times.append(seconds)
        return Timing.of(times)


def extrapolated(
    size: int,
    before: Sequence[tuple[int, OpMeasurement]],
    budget: Budget,
    state_bytes: int | None = None,
) -> OpMeasurement | None:
    """The measurement of a long op at a larger size, where it grows in proportion; else None.

    Args:
        size: The larger size, samples.
        before: (size, measurement) of the same op at smaller sizes, ascending.
        budget: Says what is long, and too long.
        state_bytes: Bytes of its parameters; None: not known.
    """
    if not before:
        return None
    large, second = before[-1]
    seconds = second.forward.seconds + second.backward.seconds
    grown = size / large
    if seconds < budget.long or seconds * grown < budget.longest:
        return None
    # Weights are read twice, their gradient is written and added up.
    fixed = None if state_bytes is None else 4 * state_bytes / SLOW_BANDWIDTH
    if not (seconds > budget.longest and fixed is not None and fixed < MOST_FIXED * seconds):
        if len(before) < 2:
            return None
        small, first = before[-2]
        for a, b in ((first.forward, second.forward), (first.backward, second.backward)):
            if abs(a.seconds / small * large - b.seconds) > 0.1 * b.seconds:
                return None
    return OpMeasurement(
        Timing(second.forward.seconds * grown, second.forward.spread),
        Timing(second.backward.seconds * grown, second.backward.spread),
        tuple(replace(item, nbytes=round(item.nbytes * grown)) for item in second.saved),
        round(second.workspace * grown) if second.workspace >= 0 else -1,
    )


def changes_first_argument(facts: OpFacts) -> bool:
    """Whether the op writes into its first argument."""
    target, _, _ = operator_of(facts.node)
    if not isinstance(target, torch._ops.OpOverload):
        return False
    arguments = target._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].is_write


def _activations(args: Any, kwargs: Any, facts: OpFacts) -> list[torch.Tensor]:
    """The tensors among the arguments that are neither parameters nor buffers."""
    leaves = pytree.tree_leaves((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor, fact in zip(given, facts.tensors, strict=True) if not fact.state]


def _with_gradient(result: Any) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in pytree.tree_leaves(result)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def _classified(
    packed: list[torch.Tensor],
    given: list[torch.Tensor],
    results: list[torch.Tensor],
    facts: OpFacts,
) -> tuple[Saved, ...]:
    """What the saved tensors are, each memory once; parameters do not count."""
    inputs = {_storage(tensor): i for i, tensor in enumerate(given)}
    outputs = {_storage(tensor): i for i, tensor in enumerate(results)}
    tensors = facts.tensors
    found: dict[int, Saved] = {}
    for tensor in packed:
        if tensor.is_sparse:
            continue
        key = _storage(tensor)
        if key in inputs:
            if not tensors[inputs[key]].state:
                found.setdefault(key, Saved("input", inputs[key]))
        elif key in outputs:
            found.setdefault(key, Saved("output", outputs[key]))
        else:
            nbytes = tensor.untyped_storage().nbytes()
            internal = sum(item.kind == "internal" for item in found.values())
            found.setdefault(key, Saved("internal", internal, nbytes))
    return tuple(found.values())


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
