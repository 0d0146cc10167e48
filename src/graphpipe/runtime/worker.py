"""One rank of a pipeline: its parameters, its stages, its optimizer, its part of a step.

Everything that waits for other ranks is a generator (see
:mod:`graphpipe.runtime.transport`), so that the same code runs alone in a process and
together with other ranks in one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from graphpipe.errors import CheckpointError, StageFailedError
from graphpipe.graph.model_graph import Parameter
from graphpipe.plan.ranges import SampleRange, copy_range, micro_batch_range
from graphpipe.runtime.agreement import Agreement
from graphpipe.runtime.count import CountRunner
from graphpipe.runtime.executor import Executor, Iteration, TaskRecord
from graphpipe.runtime.failures import Watchdog
from graphpipe.runtime.losses import Weight, add_losses, term_weight
from graphpipe.runtime.optimize import (
    LossScale,
    OptimizerFactory,
    build_optimizer,
    clip_gradients,
    gradient_norm,
    unscale,
)
from graphpipe.runtime.randomness import generator_of
from graphpipe.runtime.reduce import GradientReducer
from graphpipe.runtime.stage_module import build_stage_module, sparse_parameters, state_names
from graphpipe.runtime.stage_runner import StageRunner
from graphpipe.runtime.state import StateSource
from graphpipe.runtime.transport import Eventually, Handle, Lane, Transport, Wait
from graphpipe.runtime.variant import Variant


@dataclass(frozen=True)
class WorkerOptions:
    """What all ranks of a pipeline have in common.

    Attributes:
        seed: Seed of random ops.
        clip_norm: Largest norm of the whole gradient, or None.
        clip_norm_type: p of that norm.
        autocast: Makes a fresh autocast context, or None.
        overlap: Whether gradients are reduced while backwards still run.
        compile: Turns a stage module into a faster callable, or None.
        watchdog: Told what runs, or None.
    """

    seed: int = 0
    clip_norm: float | None = None
    clip_norm_type: float = 2.0
    autocast: Callable[[], AbstractContextManager[Any]] | None = None
    overlap: bool = True
    compile: Callable[[nn.Module], Callable[..., Any]] | None = None
    watchdog: Watchdog | None = None


class Worker:
    """One rank.

    Args:
        rank: The rank.
        variant: The variant that was planned; it decides which parameters the rank holds.
        source: Where initial values come from.
        device: Where the rank's tensors live.
        transport: How it reaches other ranks.
        optimizer: Builds the optimizer from (name, parameter) pairs; None: no training.
        options: See :class:`WorkerOptions`.
        scale: Loss scaling, or None.
    """

    def __init__(
        self,
        rank: int,
        variant: Variant,
        source: StateSource,
        device: torch.device,
        transport: Transport,
        optimizer: OptimizerFactory | None,
        options: WorkerOptions,
        scale: LossScale | None = None,
    ) -> None:
        self.rank = rank
        self.device = device
        self.options = options
        self.scale = scale
        self._transport = transport
        self._holders = holders(variant)
        self.state = self._materialise(variant, source)
        self.parameters = {
            name: value
            for name, value in self.state.items()
            if isinstance(value, nn.Parameter) and value.requires_grad
        }
        self._owned = [name for name in self.parameters if self._holders[name][0] == rank]
        self.optimizer: torch.optim.Optimizer | None = None
        if optimizer is not None:
            self.optimizer = build_optimizer(optimizer, self.parameters, device)
        self._reducer = GradientReducer(
            rank,
            transport,
            self.parameters,
            {name: ranks for name, ranks in self._holders.items() if len(ranks) > 1},
            {
                name: [
                    stage
                    for stage in variant.hosted(rank)
                    if variant.plan.stages[stage].has_backward
                    and name in variant.cuts[stage].parameters
                ]
                for name in self.parameters
            },
            sparse_parameters(variant.program),
        )
        self._runners: dict[int, dict[int, StageRunner]] = {}
        self._counters: dict[int, list[tuple[int, int, CountRunner]]] = {}
        self._executors: dict[tuple[int, int], Executor] = {}
        self._generator = generator_of(device)

    def _materialise(self, variant: Variant, source: StateSource) -> dict[str, torch.Tensor]:
        """The tensors of this rank's stages by canonical name, in model order, on its device."""
        state: dict[str, torch.Tensor] = {}
        for item in variant.graph.parameters:
            if self.rank not in self._holders[item.name]:
                continue
            value = source.tensor(item.name)
            _check_value(item, value)
            value = value.to(self.device)
            if not item.is_buffer:
                value = nn.Parameter(value, requires_grad=item.trainable)
            state[item.name] = value
        return state

    # --- stages -------------------------------------------------------------------------

    def runners(self, variant: Variant) -> dict[int, StageRunner]:
        """The runners of a variant's stages on this rank."""
        key = id(variant)
        if key not in self._runners:
            self._runners[key] = {
                stage: self._runner(variant, stage) for stage in variant.hosted(self.rank)
            }
        return self._runners[key]

    def _state_for(self, variant: Variant, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Values by name: this rank's own, and the constants of the variant."""
        out: dict[str, torch.Tensor] = {}
        for name in names:
            value = self.state.get(name)
            if value is None and name not in variant.graph.parameter_by_name:
                constant = variant.program.state.get(name)
                value = None if constant is None else constant.to(self.device)
            if value is not None:
                out[name] = value
        return out

    def _runner(self, variant: Variant, stage: int) -> StageRunner:
        plan_stage, cut = variant.plan.stages[stage], variant.cuts[stage]
        interface = variant.interfaces[stage]
        by_name = variant.graph.op_by_name
        program = variant.program
        ops = [by_name[name] for name in variant.needed_ops(stage)]
        random = {op.name: op.random_key or op.key for op in ops if op.random}
        module = build_stage_module(
            program,
            ops=variant.needed_ops(stage),
            prep=cut.prep,
            inputs=interface.inputs,
            outputs=interface.outputs,
            state=self._state_for(variant, state_names(program, cut.ops, cut.prep)),
            device=self.device,
            random_keys=random,
            name=f"Stage{variant.origin[stage]}",
        )
        mutated = sorted({name for op in ops for name in op.mutates})
        # Seeding is a side effect, and buffers are exchanged between forwards: both would make
        # a compiled form start over.
        compiled = None
        if self.options.compile is not None and not random and not mutated:
            compiled = self.options.compile(module)
        return StageRunner(
            module,
            has_backward=plan_stage.has_backward and variant.training,
            recompute=plan_stage.recompute,
            mutated=mutated,
            random=bool(random),
            device=self.device,
            autocast=self.options.autocast,
            call=compiled,
        )

    def _executor(self, variant: Variant, batch_size: int) -> Executor:
        key = (id(variant), batch_size)
        if key not in self._executors:
            self._executors[key] = Executor(
                variant.rank_program(self.rank, batch_size),
                self.runners(variant),
                [stage.name for stage in variant.plan.stages],
                self._transport,
                self.device,
                self.options.watchdog,
            )
        return self._executors[key]

    # --- one mini-batch -----------------------------------------------------------------

    def run(
        self,
        variant: Variant,
        leaves: Sequence[Any],
        batch_size: int,
        step: int,
        *,
        factor: float = 1.0,
        reduce: bool = False,
        trace: bool = False,
        agreement: Agreement | None = None,
    ) -> Eventually[Outcome]:
        """Runs one mini-batch on this rank.

        Args:
            variant: What to run.
            leaves: Values of the graph inputs; those that this rank does not read may
                be on the meta device.
            batch_size: Samples of the mini-batch.
            step: For seeding.
            factor: Factor on the gradients (not on the reported loss).
            reduce: Whether gradients are summed over ranks as soon as they are complete.
            trace: Whether the times of tasks are recorded.
            agreement: Settled before anything is sent.

        Raises:
            StageFailedError: if a task failed.
            Refusal: if the ranks do not agree on the call.
        """
        placed: list[Any] = [None] * len(leaves)
        for name in variant.needs(self.rank):
            number = variant.leaf_numbers[name]
            placed[number] = leaves[number].to(self.device)
        weights = yield from self._weights(variant, placed, batch_size, agreement)
        scale = factor * (self.scale.scale if self.scale is not None else 1.0)
        executor = self._executor(variant, batch_size)
        random = any(runner.random for runner in self.runners(variant).values())
        before = self._generator.get_state() if random else None
        iteration = Iteration(
            leaves=placed,
            seed=self.options.seed,
            step=step,
            weights=weights,
            terms=variant.graph.loss_terms,
            scale=scale,
            training=variant.training,
            trace=trace,
            agreement=agreement,
        )
        sums: list[tuple[torch.Tensor, Handle]] = []
        iteration.after_forwards = lambda: sums.append(
            add_losses(self.rank, self._transport, len(weights), iteration.losses)
        )
        if reduce:
            self._reducer.begin()
            if self.options.overlap:
                # The reducer knows the stages of the variant that was planned.
                origin = variant.origin
                iteration.after_backward = lambda s: self._reducer.after_backward(origin[s])
        start = time.monotonic_ns()
        try:
            yield from executor.run(iteration)
        except BaseException:
            for runner in self.runners(variant).values():
                runner.discard_buffers()
            raise
        finally:
            if before is not None:
                self._generator.set_state(before)
        yield from self._share_buffers(variant)
        (total,) = sums
        return Outcome(*total, iteration.results, iteration.records, start)

    def _weights(
        self,
        variant: Variant,
        leaves: Sequence[Any],
        batch_size: int,
        agreement: Agreement | None,
    ) -> Eventually[list[Weight]]:
        """Weights of the loss terms; counts are summed over the stage's replicas and copies."""
        if variant.purpose == "predict":
            return []
        counts: dict[int, float] = {}
        for term, stage, counter in self._counting(variant):
            total = torch.zeros(1, dtype=torch.float64)
            for samples in self._samples_of(variant, stage, batch_size):
                total += counter.count(leaves, samples)
            group = variant.plan.stages[stage].devices
            if len(group) > 1:
                if agreement is not None:
                    yield from agreement.settle()
                handle = self._transport.all_reduce(self.rank, group_of(group), total)
                while not handle.poll():
                    yield
            counts[term] = float(total)
        return [
            # A term of another rank's stage has no weight here; nothing here asks for it.
            term_weight(term, batch_size, counts.get(i, 1.0))
            for i, term in enumerate(variant.graph.loss_terms)
        ]

    def _counting(self, variant: Variant) -> list[tuple[int, int, CountRunner]]:
        key = id(variant)
        if key not in self._counters:
            self._counters[key] = [
                (term, stage, CountRunner(variant, name, self.device))
                for stage in variant.hosted(self.rank)
                for term, name in variant.count_ops(stage)
            ]
        return self._counters[key]

    def _samples_of(self, variant: Variant, stage: int, batch_size: int) -> list[SampleRange]:
        """The samples of each micro-batch of a stage that this rank runs."""
        item = variant.plan.stages[stage]
        place = item.devices.index(self.rank)
        copy, replica = divmod(place, item.replicas)
        owned = copy_range(copy, variant.plan.copies, batch_size)
        count = -(-len(owned) // item.micro_batch)
        return [
            micro_batch_range(owned, item.micro_batch, i)
            for i in range(replica, count, item.replicas)
        ]

    def _share_buffers(self, variant: Variant) -> Wait:
        """Keeps the buffers that forwards changed; replica 0's are what every replica goes on
        with, as in data-parallel training."""
        for stage, runner in self.runners(variant).items():
            if not runner.mutated:
                continue
            values = runner.commit_buffers()
            group = variant.plan.stages[stage].devices
            if len(group) == 1:
                continue
            for value in values:
                handle = self._transport.broadcast(self.rank, group_of(group), value, group[0])
                while not handle.poll():
                    yield

    # --- the optimizer step -------------------------------------------------------------

    def zero_gradients(self) -> None:
        """Drops all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def reduce_gradients(self, *, begun: bool) -> Wait:
        """Sums the gradients of parameters that other ranks hold too.

        Args:
            begun: Whether :meth:`run` has launched some of the reductions.
        """
        if not begun:
            self._reducer.begin()
        yield from self._reducer.finish()

    def update(self) -> Eventually[tuple[float | None, bool]]:
        """Clips, then steps the optimizer unless a gradient overflowed.

        Returns:
            The gradient's norm before clipping (None without clipping), and whether the
            optimizer stepped.

        Raises:
            StageFailedError: if the optimizer's step raised.
        """
        finite = True
        if self.scale is not None:
            finite = unscale(self.parameters, self.scale.scale)
            flag = torch.tensor([1.0 if finite else 0.0])
            everyone = tuple(range(self._transport.world_size))
            handle = self._transport.all_reduce(self.rank, everyone, flag, "min")
            while not handle.poll():
                yield
            finite = bool(flag.item())
            self.scale.update(finite)
        norm: float | None = None
        if self.options.clip_norm is not None:
            norm = yield from gradient_norm(
                self.rank,
                self._transport,
                self.parameters,
                self._owned,
                self.options.clip_norm_type,
            )
            if finite:
                clip_gradients(self.parameters, self.options.clip_norm, norm)
        if finite and self.optimizer is not None:
            try:
                self.optimizer.step()
            except Exception as error:
                raise StageFailedError(
                    f"The optimizer step failed: {type(error).__name__}: {error}",
                    where=f"rank {self.rank}",
                ) from error
        return norm, finite


def _check_value(item: Parameter, value: torch.Tensor) -> None:
    have = (list(value.shape), str(value.dtype).removeprefix("torch."))
    want = (list(item.shape), item.dtype)
    if have != want:
        raise CheckpointError(
            "An initial value does not have the shape and dtype of the parameter",
            where=item.name,
            expected=f"{want[1]} {want[0]}",
            got=f"{have[1]} {have[0]}",
            fix="Give the state of the model that was captured",
        )


@dataclass
class Outcome:
    """What a mini-batch gave on one rank.

    Attributes:
        terms: The loss terms of the mini-batch, weighted, the same on every rank once
            ``complete`` is.
        complete: The reduction of ``terms``, under way.
        results: By output number, (first sample, samples, value) of this rank's micro-batches.
        records: Times of this rank's tasks, if they were asked for.
        start_ns: When the rank started, on its monotonic clock.
    """

    terms: torch.Tensor
    complete: Handle
    results: Mapping[int, list[tuple[int, int, torch.Tensor]]]
    records: list[TaskRecord]
    start_ns: int


def holders(variant: Variant) -> dict[str, tuple[int, ...]]:
    """By canonical name, the ranks that hold a parameter or buffer, ascending.

    What no stage reads belongs to rank 0, so that nothing of the model is lost.
    """
    ranks: dict[str, set[int]] = {item.name: set() for item in variant.graph.parameters}
    for cut, stage in zip(variant.cuts, variant.plan.stages, strict=True):
        for name in cut.parameters:
            ranks[name].update(stage.devices)
    return {name: tuple(sorted(found)) or (0,) for name, found in ranks.items()}


def group_of(devices: Sequence[int]) -> tuple[int, ...]:
    """A stage's ranks as a group for collectives."""
    return tuple(sorted(devices))


def message_pairs(variant: Variant) -> set[tuple[int, int]]:
    """Every ordered pair of ranks between which a run of this plan sends messages."""
    plan = variant.plan
    pairs: set[tuple[int, int]] = set()
    for edge in plan.edges:
        for copy in range(plan.copies):
            ends = [
                stage.devices[copy * stage.replicas : (copy + 1) * stage.replicas]
                for stage in (plan.stages[edge.source], plan.stages[edge.target])
            ]
            for one, other in product(*ends):
                if one != other:
                    pairs |= {(one, other), (other, one)}
    return pairs


def collective_groups(variant: Variant) -> set[tuple[Lane, tuple[int, ...]]]:
    """Every (lane, group) over which a run of this plan reduces or broadcasts."""
    groups: set[tuple[Lane, tuple[int, ...]]] = set()
    for name, ranks in holders(variant).items():
        if len(ranks) > 1 and variant.graph.parameter_by_name[name].trainable:
            groups.add(("gradient", ranks))
    for stage in variant.plan.stages:
        if len(stage.devices) > 1:
            groups.add(("control", group_of(stage.devices)))
    return groups
