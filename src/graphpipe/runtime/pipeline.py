"""``Pipeline``: runs a plan."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from graphpipe.cost.profiler.heap import keep_memory
from graphpipe.errors import (
    CheckpointError,
    GraphPipeError,
    RuntimeSetupError,
)
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.actions import Ordering
from graphpipe.plan.plan import Plan
from graphpipe.runtime.agreement import Refusal
from graphpipe.runtime.call import Call, bind_call, description
from graphpipe.runtime.checkpoint.checkpointer import Checkpointer, Progress, SaveHandle
from graphpipe.runtime.elementwise import sliced_factory
from graphpipe.runtime.failures import FailureBoard, PeerLostError, Watchdog
from graphpipe.runtime.gather import gather_outputs, gather_records, gather_state
from graphpipe.runtime.optimize import LossScale, OptimizerFactory
from graphpipe.runtime.process_group import ProcessGroupTransport, ensure_process_group
from graphpipe.runtime.sources import initial_values
from graphpipe.runtime.trace import measured_timeline
from graphpipe.runtime.transport import InProcess, Transport, run_together, wait
from graphpipe.runtime.variant import Purpose, Variant
from graphpipe.runtime.variants import VariantCache
from graphpipe.runtime.worker import (
    Outcome,
    Worker,
    WorkerOptions,
    collective_groups,
    holders,
    message_pairs,
)
from graphpipe.simulate.timeline import Timeline

T = TypeVar("T")


class Pipeline:
    """A model that is trained as a graph of pipeline stages.

    Every process of a run makes one, with the same arguments, and calls the same methods in
    the same order. The model that it is given is not changed: each rank takes copies of the
    parameters of its own stages.

    Args:
        model: The module that was captured; on the meta device if its values come from
            ``state`` or are drawn.
        plan: The plan. Its world size must be that of the run.
        loss_fn: As it was given to ``capture``.
        optimizer: Makes the optimizer from this rank's (name, parameter) pairs; None: no
            training.
        graph: The graph that was planned, as ``capture`` returned it. By default the model is
            captured again from the input signature in the plan.
        transport: ``"process_group"``: this process is one rank (torchrun);
            ``"in_process"``: this process runs all ranks, one after the other; or a transport.
        state: Initial values by name: a safetensors file, a directory of them, a checkpoint of
            ``torch.distributed.checkpoint``, or what :meth:`save` wrote.
        init: ``"model"``: the model's own values; ``"seeded"``: for a meta model, values drawn
            by its modules' ``reset_parameters`` from ``seed`` and their names.
        device: Where this process computes; by default the CPU.
        seed: Seed of dropout and other random ops, and of ``init="seeded"``.
        timeout: Seconds after which a transfer or a task without progress is a failure.
        clip_norm: Largest norm of the whole model's gradient.
        clip_norm_type: p of that norm.
        autocast: Run forwards under ``torch.autocast`` with this dtype.
        loss_scale: Dynamic loss scaling (for fp16).
        compile: Run stages through ``torch.compile`` (stages with random ops stay as they are).
        overlap: Reduce gradients while backwards still run (not on NCCL).
        message_order: How messages are ordered (:func:`graphpipe.plan.actions.build_actions`);
            by default ``global`` where all messages go over one NCCL communicator, else
            ``channel``.
        message_groups: ``"one"`` group (on CUDA: communicator) for all messages, or one for
            each ordered pair of ranks, where that measures faster.
        variants: ``"refuse"``: inputs of another shape or structure than captured are an
            error; ``"capture"``: they get a variant of the graph on the same partition.
        capture_options: Options of ``capture`` for the captures made here.

    Raises:
        RuntimeSetupError: if world size, model, graph and plan do not fit together.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        loss_fn: Callable[..., Any] | None = None,
        optimizer: OptimizerFactory | None = None,
        *,
        graph: ModelGraph | None = None,
        transport: Transport | Literal["process_group", "in_process"] = "process_group",
        state: str | None = None,
        init: Literal["model", "seeded"] = "model",
        device: torch.device | str | None = None,
        seed: int = 0,
        timeout: float = 1800.0,
        clip_norm: float | None = None,
        clip_norm_type: float = 2.0,
        autocast: torch.dtype | None = None,
        loss_scale: LossScale | bool | None = None,
        compile: bool = False,
        overlap: bool = True,
        message_order: Ordering | None = None,
        message_groups: Literal["one", "pairs"] = "one",
        variants: Literal["refuse", "capture"] = "refuse",
        capture_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.plan = plan
        self.device = torch.device(device or "cpu")
        if self.device.type == "cpu":
            keep_memory()
        ordering: Ordering = "channel"
        if transport == "process_group" and self.device.type == "cuda":
            # NCCL ignores tags and makes one rank's operations wait for one another.
            ordering = "global" if message_groups == "one" else "channel"
            overlap = False
        self._variants = VariantCache(
            model,
            plan,
            loss_fn,
            graph,
            capture_options or {},
            capture_new=variants == "capture",
            autocast=None if autocast is None else (self.device.type, autocast),
            ordering=message_order or ordering,
        )
        first = self._variants.first
        self.graph = first.graph
        self.transport = self._connect(transport, first, timeout, message_groups)
        self._variants.ranks = self.transport.ranks
        self._board = FailureBoard.connect() if len(self.transport.ranks) == 1 else None
        self._watchdog = Watchdog(timeout, self._board) if self._board is not None else None
        scale = LossScale() if loss_scale is True else (loss_scale or None)
        options = WorkerOptions(
            seed=seed,
            clip_norm=clip_norm,
            clip_norm_type=clip_norm_type,
            autocast=None if autocast is None else _autocast(self.device, autocast),
            overlap=overlap,
            compile=_compile if compile else None,
            watchdog=self._watchdog,
        )
        source = initial_values(model, first, state, init, seed)
        if optimizer is not None:
            optimizer = sliced_factory(optimizer, self.graph)
        self._holders = holders(first)
        self.workers: tuple[Worker, ...] = tuple(
            Worker(
                rank, first, source, self.device, self.transport, optimizer, options,
                None if scale is None else scale.copy(),
            )
            for rank in self.transport.ranks
        )  # fmt: skip
        self.iterations = 0
        """Mini-batches run so far; it is part of the seed of random ops."""
        self.last_gradient_norm: float | None = None
        """Norm of the whole gradient before clipping, of the last step that clipped."""
        self.last_step_skipped = False
        """Whether the last step was skipped because a gradient overflowed."""
        self._accumulated = False
        self._failure: str | None = None
        self._checkpoints = Checkpointer(
            self.graph, self.workers, self._holders, self.transport, timeout, self._watchdog,
            self.device, self._explained,
        )  # fmt: skip

    def _connect(
        self,
        transport: Transport | Literal["process_group", "in_process"],
        first: Variant,
        timeout: float,
        message_groups: Literal["one", "pairs"],
    ) -> Transport:
        if transport == "in_process":
            return InProcess(self.plan.world_size)
        if not isinstance(transport, str):
            found: Transport = transport
            self._check_world(found.world_size)
            return found
        self._check_world(ensure_process_group(self.device, timeout))
        pairs = message_pairs(first) if message_groups == "pairs" else ()
        return ProcessGroupTransport(collective_groups(first), timeout, self.device, pairs)

    def _check_world(self, world_size: int) -> None:
        if world_size != self.plan.world_size:
            raise RuntimeSetupError(
                "The number of processes is not that of the plan",
                where="world size",
                expected=f"{self.plan.world_size} processes, one for each device of the plan",
                got=world_size,
                fix=f"Start with torchrun --nproc-per-node={self.plan.world_size}, or plan for "
                f"{world_size} devices",
            )

    @property
    def unread_inputs(self) -> set[str]:
        """Paths of the inputs, such as ``kwargs['image']``, that no stage of this process
        reads; see :mod:`graphpipe.runtime.inputs`."""
        return self._variants.unread(self._variants.first)

    @property
    def first_variant(self) -> Variant:
        """The variant of the graph that was planned."""
        return self._variants.first

    # --- training -----------------------------------------------------------------------

    def step(
        self,
        args: Sequence[Any] | torch.Tensor = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        targets: Any = None,
    ) -> torch.Tensor:
        """Trains on one mini-batch.

        Args:
            args: Positional inputs of the model (or the only one): the whole mini-batch, on
                every rank. An input that this process does not read (:attr:`unread_inputs`)
                may be a tensor of its shape on the meta device, so that no rank need load it.
            kwargs: Keyword inputs of the model.
            targets: Second argument of the loss function.

        Returns:
            The mini-batch's loss, the same on every rank.

        Raises:
            InputError: if the inputs are not those of the capture, or not the same on all ranks;
                every rank raises it, nothing has been sent, and the pipeline goes on.
            StageFailedError: if a task failed; the pipeline refuses to go on after that.
        """
        loss, _ = self._train(args, kwargs, targets, 1.0, update=True)
        return loss

    def accumulate(
        self,
        args: Sequence[Any] | torch.Tensor = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        targets: Any = None,
        factor: float = 1.0,
    ) -> torch.Tensor:
        """Adds ``factor`` times the gradient of one mini-batch; :meth:`update` uses the sum.

        Returns:
            The mini-batch's loss (without ``factor``), the same on every rank.
        """
        loss, _ = self._train(args, kwargs, targets, factor, update=False)
        return loss

    def update(self) -> None:
        """Steps the optimizer with the gradients that :meth:`accumulate` added up."""
        self._drive([self._update_program(worker) for worker in self.workers])
        self._accumulated = False

    def trace_step(
        self,
        args: Sequence[Any] | torch.Tensor = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        targets: Any = None,
    ) -> tuple[torch.Tensor, Timeline]:
        """:meth:`step`, and when every task of every rank ran."""
        loss, records = self._train(args, kwargs, targets, 1.0, update=True, trace=True)
        return loss, measured_timeline(self.plan, records)

    def _train(
        self,
        args: Sequence[Any] | torch.Tensor,
        kwargs: Mapping[str, Any] | None,
        targets: Any,
        factor: float,
        *,
        update: bool,
        trace: bool = False,
    ) -> tuple[torch.Tensor, Any]:
        bound = self._bind(
            "train", args, kwargs, targets, f"factor {factor!r}, update {update}, trace {trace}"
        )
        fresh = not self._accumulated
        programs = [
            self._train_program(worker, bound, factor, fresh, update, trace)
            for worker in self.workers
        ]
        results = self._drive(programs)
        self.iterations += 1
        self._accumulated = not update
        terms, records = results[0]
        return self._loss(bound.variant, terms), records

    def _train_program(
        self,
        worker: Worker,
        bound: Call,
        factor: float,
        fresh: bool,
        update: bool,
        trace: bool,
    ) -> Generator[None, None, tuple[torch.Tensor, Any]]:
        if fresh:
            worker.zero_gradients()
        # Gradients that were accumulated before are complete only with this mini-batch, so the
        # reductions may start as soon as its last backwards end.
        outcome: Outcome = yield from worker.run(
            bound.variant, bound.leaves, bound.samples, self.iterations,
            factor=factor, reduce=update, trace=trace, agreement=bound.agreement,
        )  # fmt: skip
        if update:
            yield from self._update_program(worker, begun=True)
        yield from wait(outcome.complete)
        records = None
        if trace:
            records = yield from gather_records(
                worker.rank,
                self.transport,
                outcome.records,
                outcome.start_ns,
                time.monotonic_ns(),
            )
        return outcome.terms, records

    def _update_program(self, worker: Worker, begun: bool = False) -> Generator[None, None, None]:
        yield from worker.reduce_gradients(begun=begun)
        norm, stepped = yield from worker.update()
        self.last_gradient_norm = norm
        self.last_step_skipped = not stepped

    def _loss(self, variant: Variant, terms: torch.Tensor) -> torch.Tensor:
        return terms.sum().to(variant.loss_dtype)

    def _bind(
        self,
        purpose: Purpose,
        args: Sequence[Any] | torch.Tensor,
        kwargs: Mapping[str, Any] | None,
        targets: Any,
        details: str = "",
    ) -> Call:
        """What a call runs. What this rank refuses is raised on all ranks at the same point."""
        self._check_whole()
        call, refusal = bind_call(
            self._variants, self.transport, purpose, args, kwargs, targets,
            f"step {self.iterations}{', ' if details else ''}{details}",
        )  # fmt: skip
        if refusal is not None:
            self._drive([refusal.settle()])
        assert call is not None
        return call

    # --- evaluation ---------------------------------------------------------------------

    def eval_step(
        self,
        args: Sequence[Any] | torch.Tensor = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        targets: Any = None,
    ) -> torch.Tensor:
        """The loss of one mini-batch in evaluation mode, the same on every rank."""
        bound = self._bind("loss", args, kwargs, targets)

        def program(worker: Worker) -> Generator[None, None, torch.Tensor]:
            outcome = yield from worker.run(
                bound.variant, bound.leaves, bound.samples, self.iterations,
                agreement=bound.agreement,
            )  # fmt: skip
            yield from wait(outcome.complete)
            return outcome.terms

        return self._loss(bound.variant, self._drive([program(w) for w in self.workers])[0])

    def predict(
        self, args: Sequence[Any] | torch.Tensor = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The model's output in evaluation mode, on the CPU of every rank, in sample order."""
        bound = self._bind("predict", args, kwargs, None)
        variant, leaves, batch_size = bound.variant, bound.leaves, bound.samples

        def program(worker: Worker) -> Generator[None, None, list[torch.Tensor]]:
            outcome = yield from worker.run(
                variant, leaves, batch_size, self.iterations, agreement=bound.agreement
            )
            yield from wait(outcome.complete)
            values = yield from gather_outputs(
                worker.rank, self.transport, variant, leaves, outcome.results, batch_size
            )
            return values

        values = self._drive([program(worker) for worker in self.workers])[0]
        return variant.program.output.restore(values, samples=batch_size)

    # --- state --------------------------------------------------------------------------

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """This process's trainable parameters under the model's own names. Where it runs
        several ranks, a parameter that several of them hold comes once; of a weight whose
        join is split, every slice comes, all under its one name."""
        found: dict[str, nn.Parameter] = {}
        for worker in self.workers:
            for name, parameter in worker.parameters.items():
                found.setdefault(name, parameter)
        known = self.graph.parameter_by_name
        return [(known[name].canonical, parameter) for name, parameter in found.items()]

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers of this process's ranks."""
        return tuple(w.optimizer for w in self.workers if w.optimizer is not None)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """This rank's optimizer, for learning rate schedulers.

        Raises:
            RuntimeSetupError: if this process runs several ranks, or none was given.
        """
        if len(self.optimizers) != 1:
            raise RuntimeSetupError(
                "This process does not have one optimizer",
                expected="one rank and an optimizer factory",
                got=f"{len(self.optimizers)} optimizers",
                fix="Use pipe.optimizers, and one scheduler for each of them",
            )
        return self.optimizers[0]

    def state_dict(self, to: int | None = None) -> dict[str, torch.Tensor]:
        """All parameters and persistent buffers by the model's names, gathered on the CPU.

        ``model.load_state_dict`` takes them. Every rank must call it.

        Args:
            to: The only rank that gets them; others get an empty dictionary. None: all ranks.
        """
        programs = [
            gather_state(worker.rank, self.transport, self.graph, self._holders, worker.state, to)
            for worker in self.workers
        ]
        results = self._drive(programs)
        return max(results, key=len)

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        schedulers: Sequence[Any] = (),
        data: Any = None,
        keep: int | None = None,
        background: bool = False,
    ) -> SaveHandle:
        """Saves a checkpoint into a new folder ``step-...`` of ``directory``.

        It holds parameters, buffers, optimizer, loss scale, schedulers, random states and
        :attr:`iterations`. Every rank must call it, between steps. What is killed half-way
        leaves the earlier checkpoints as they were, and nothing that looks like one.

        Args:
            directory: A folder that all machines share.
            schedulers: Learning rate schedulers of :attr:`optimizers`, in a fixed order.
            data: Position in the data: plain values, or an object with ``state_dict()``.
                Rank 0's is saved; :meth:`load` returns it.
            keep: How many complete checkpoints stay, this one included; None: all.
            background: Copies everything to the memory of the CPU and writes it while training
                goes on; the next save, load or :meth:`close` waits for it.

        Returns:
            The save: ``handle.wait()`` returns the checkpoint's folder.

        Raises:
            CheckpointError: if it cannot be written, or ``data`` or a scheduler has something
                that is not plain data. A failure in the background is raised by the handle,
                and by whatever waits for the save.
            RuntimeSetupError: if an earlier call failed: parameters may be half stepped.
        """
        self._check_whole()
        if self._accumulated:
            raise CheckpointError(
                "Gradients that were accumulated are not part of a checkpoint",
                fix="Save after update()",
            )
        progress = Progress(self.iterations, self.workers[0].options.seed)
        return self._checkpoints.save(
            Path(directory), progress,
            schedulers=schedulers, data=data, keep=keep, background=background,
        )  # fmt: skip

    def load(
        self,
        directory: str | os.PathLike[str],
        *,
        schedulers: Sequence[Any] = (),
        model_only: bool = False,
        missing_ok: bool = False,
    ) -> Any:
        """Goes on from a checkpoint, whatever plan it was saved under. Every rank must call it.

        Under the same plan training goes on bit by bit as if it had not stopped.

        Args:
            directory: Where :meth:`save` wrote (the newest complete checkpoint is loaded), or
                one of its checkpoints.
            schedulers: As they were saved, built anew on this pipeline's optimizers.
            model_only: Take parameters and buffers only, and start training anew.
            missing_ok: Do nothing where no checkpoint has been saved yet, so that a first start
                and a later one are the same program.

        Returns:
            What was saved as ``data``; None with ``model_only``, or where nothing was loaded.

        Raises:
            CheckpointError: if there is no complete checkpoint, it is damaged, or of another
                model (the first differing names are told). The pipeline is as it was then.
        """
        progress, data = self._checkpoints.load(
            Path(directory),
            schedulers=schedulers, model_only=model_only, missing_ok=missing_ok,
        )  # fmt: skip
        if progress is not None:
            self.iterations = progress.iterations
        self._accumulated = False
        return data

    def close(self) -> None:
        """Waits for a save in the background, stops the watchdog, lets the transport go."""
        try:
            self._checkpoints.close()
        finally:
            if self._watchdog is not None:
                self._watchdog.close()
            self.transport.close()

    # --- running ------------------------------------------------------------------------

    def _check_whole(self) -> None:
        """Refuses to go on after a failure: messages may be under way, parameters half stepped."""
        if self._failure is not None:
            raise RuntimeSetupError(
                "This pipeline failed in an earlier call and cannot go on",
                got=self._failure,
                fix="Make a new Pipeline (with several processes: start them again) and load the "
                "last checkpoint",
            )

    def _drive(self, programs: Sequence[Generator[None, None, T]]) -> list[T]:
        """Runs the programs of this process's ranks to their ends; returns their results."""
        self._check_whole()
        try:
            if isinstance(self.transport, InProcess):
                results: list[Any] = run_together(self.transport, programs)
                return results
            assert len(programs) == 1
            while True:
                next(programs[0])
        except StopIteration as stop:
            return [stop.value]
        except Refusal as refusal:
            raise refusal.error from None
        except PeerLostError as error:
            explained = self._explained(error)
            self._failure = str(explained)
            raise explained from error
        except BaseException as error:
            self._failure = description(error)
            if self._board is not None:
                rank = self.transport.ranks[0]
                ours = isinstance(error, GraphPipeError)  # those name the rank themselves
                self._board.report(self._failure if ours else f"Rank {rank}: {self._failure}")
            raise

    def _explained(self, error: PeerLostError) -> Exception:
        """What to raise for the loss of a peer: the first failure, if it is known."""
        if self._board is None:
            return error
        return self._board.explain(error, self.transport.ranks[0])


def _autocast(
    device: torch.device, dtype: torch.dtype
) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: torch.autocast(device.type, dtype=dtype)


def _compile(module: nn.Module) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(module, dynamic=False)
    return compiled
