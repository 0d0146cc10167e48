"""Saves and loads a pipeline: what ``Pipeline.save`` and ``Pipeline.load`` do."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from graphpipe.errors import CheckpointError, GraphPipeError
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.runtime.checkpoint import folder as folders
from graphpipe.runtime.checkpoint.engine import (
    FolderReader,
    FolderWriter,
    PieceLoadPlanner,
    PieceSavePlanner,
)
from graphpipe.runtime.checkpoint.facts import (
    merged_optimizer,
    optimizer_facts,
    random_facts,
    restore_random,
    schedulers_of,
)
from graphpipe.runtime.checkpoint.index import Index, OptimizerEntry, TensorEntry, TrainingEntry
from graphpipe.runtime.checkpoint.pieces import Piece, optimizer_pieces, state_pieces
from graphpipe.runtime.checkpoint.restore import Restore
from graphpipe.runtime.checkpoint.values import decode, encode
from graphpipe.runtime.failures import PeerLostError, Watchdog, lost_contact
from graphpipe.runtime.transport import Transport
from graphpipe.runtime.worker import Worker


class SaveHandle:
    """A save, under way or done."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._path: Path | None = None
        self._error: BaseException | None = None

    def wait(self) -> Path:
        """Waits until the checkpoint is complete; returns its folder.

        Raises:
            CheckpointError: if it could not be saved; earlier checkpoints are intact.
            StageFailedError: if another rank was lost meanwhile.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._over.is_set()

    @property
    def path(self) -> Path:
        """The checkpoint's folder; waits for it."""
        return self.wait()

    def _run(self, save: Callable[[], Path]) -> None:
        try:
            self._path = save()
        except BaseException as error:
            self._error = error
        self._over.set()


@dataclass(frozen=True)
class _Facts:
    """What one rank tells the coordinator besides its tensors."""

    optimizers: list[OptimizerEntry | None]
    schedulers: list[dict[str, Any]]
    scheduler_types: list[str]
    random: dict[str, Any]


@dataclass(frozen=True)
class Progress:
    """How far a pipeline is, the same on every rank."""

    iterations: int
    seed: int


class Checkpointer:
    """Checkpoints of one pipeline, in every process of it.

    Args:
        graph: The graph that was planned.
        workers: This process's workers.
        holders: By name the ranks that hold a parameter; the first one saves it.
        transport: How ranks reach one another.
        timeout: Seconds after which a rank that does not answer is a failure.
        watchdog: Watches what this process does alone, if there is one.
        device: Where this process computes.
        explain: Turns the loss of a peer into what caused it.
    """

    def __init__(
        self,
        graph: ModelGraph,
        workers: Sequence[Worker],
        holders: Mapping[str, Sequence[int]],
        transport: Transport,
        timeout: float,
        watchdog: Watchdog | None,
        device: torch.device,
        explain: Callable[[PeerLostError], Exception],
    ) -> None:
        self._graph = graph
        self._workers = workers
        self._holders = holders
        self._transport = transport
        self._timeout = timeout
        self._watchdog = watchdog
        self._device = device
        self._explain = explain
        self._group: Any = None
        self._pending: SaveHandle | None = None
        self._thread: threading.Thread | None = None

    # --- saving -------------------------------------------------------------------------

    def save(
        self,
        root: Path,
        progress: Progress,
        *,
        schedulers: Sequence[Any],
        data: Any,
        keep: int | None,
        background: bool,
    ) -> SaveHandle:
        """See :meth:`graphpipe.runtime.pipeline.Pipeline.save`."""
        self.settle()
        if keep is not None and keep < 1:
            raise CheckpointError("At least one checkpoint must stay", got=f"keep={keep}")
        group = self._ensure_group()

        def prepare() -> tuple[Sequence[Piece], _Facts]:
            return self._collect(schedulers, copy=background)

        def record() -> tuple[Any, Any]:
            position = data.state_dict() if hasattr(data, "state_dict") else data
            scale = self._workers[0].scale
            return (
                encode(position, "data"),
                None if scale is None else encode(scale.state_dict(), "loss scale"),
            )

        handle = SaveHandle()
        if not background:
            handle._run(lambda: self._write(root, progress, prepare, record, keep, group, True))
            handle.wait()
            return handle
        # What is saved is what is there now. An error here is told to the others in the save.
        ready, noted = _now(prepare), _now(record)
        thread = threading.Thread(
            target=handle._run,
            args=(lambda: self._write(root, progress, ready, noted, keep, group, False),),
            name="graphpipe-checkpoint",
            daemon=True,
        )
        self._pending, self._thread = handle, thread
        thread.start()
        return handle

    def settle(self) -> None:
        """Waits for a save in the background.

        Raises:
            CheckpointError: if it failed.
        """
        handle, thread = self._pending, self._thread
        self._pending = self._thread = None
        if handle is not None and thread is not None:
            thread.join()
            handle.wait()

    def _collect(self, schedulers: Sequence[Any], *, copy: bool) -> tuple[Sequence[Piece], _Facts]:
        pieces: list[Piece] = []
        optimizers: list[OptimizerEntry | None] = []
        common: list[dict[str, Any]] = []
        types: list[str] = []
        for worker in self._workers:
            owned = {key for key in worker.state if self._holders[key][0] == worker.rank}
            pieces += [piece for key, piece in state_pieces(worker, self._graph) if key in owned]
            pieces += optimizer_pieces(worker, self._graph, owned)
            mine = schedulers_of(worker, schedulers, self._workers)
            types = types or [type(scheduler).__name__ for scheduler in mine]
            entry, states = optimizer_facts(worker, self._graph, mine)
            optimizers.append(entry)
            common = common or states
        if copy:
            pieces = [replace(p, tensor=p.tensor.to("cpu", copy=True)) for p in pieces]
        return pieces, _Facts(optimizers, common, types, random_facts(self._device))

    def _write(
        self,
        root: Path,
        progress: Progress,
        prepare: Callable[[], tuple[Sequence[Piece], _Facts]],
        record: Callable[[], tuple[Any, Any]],
        keep: int | None,
        group: Any,
        watched: bool,
    ) -> Path:
        final: list[Path] = []

        def finish(
            partial: Path, tensors: tuple[TensorEntry, ...], facts: Sequence[_Facts]
        ) -> None:
            data, scale = record()
            training = TrainingEntry(
                iterations=progress.iterations,
                seed=progress.seed,
                optimizer=merged_optimizer([item for f in facts for item in f.optimizers]),
                schedulers=tuple(facts[0].schedulers),
                scheduler_types=tuple(facts[0].scheduler_types),
                scale=scale,
                random={str(rank): item.random for rank, item in enumerate(facts)},
                data=data,
            )
            index = Index(
                model=self._graph.name,
                fingerprint=self._graph.fingerprint,
                world_size=self._transport.world_size,
                tensors=tensors,
                aliases={
                    item.name: tuple(item.aliases)
                    for item in self._graph.parameters
                    if item.aliases and item.persistent
                },
                training=training,
            )
            final.append(folders.finish(partial, index, progress.iterations, keep))

        planner = PieceSavePlanner(lambda: _known_errors(prepare))
        writer = _NamingWriter(
            planner,
            lambda: folders.begin(root),
            finish,
            self._watch if watched else _unwatched,
            final,
        )
        try:
            with self._told("save"):
                metadata = save(
                    {}, storage_writer=writer, planner=planner, process_group=group,
                    no_dist=group is None,
                )  # fmt: skip
        except BaseException:
            if writer.folder is not None and not final:
                folders.discard(writer.folder)
            raise
        assert metadata.storage_meta is not None
        return Path(str(metadata.storage_meta.checkpoint_id))

    # --- loading ------------------------------------------------------------------------

    def load(
        self, path: Path, *, schedulers: Sequence[Any], model_only: bool, missing_ok: bool
    ) -> tuple[Progress | None, Any]:
        """See :meth:`graphpipe.runtime.pipeline.Pipeline.load`.

        Returns:
            How far training was (None if nothing, or with ``model_only``, was loaded), and
            the position in the data.
        """
        self.settle()
        group = self._ensure_group()
        restore: list[Restore] = []

        def prepare() -> tuple[Sequence[Piece], str]:
            if missing_ok and folders.nothing_saved(path):
                return (), "none"  # every rank must find the same
            checkpoint = folders.locate(path)
            index, digest = folders.read_index(checkpoint)
            made = Restore(checkpoint, index, self._graph, self._workers, schedulers, model_only)
            restore.append(made)
            return made.pieces, digest

        planner = PieceLoadPlanner(lambda: _known_errors(prepare), lambda: restore[0].index)
        reader = FolderReader(lambda: restore[0].folder, lambda: restore[0].index, self._watch)
        with self._told("load"):
            load(
                {}, storage_reader=reader, planner=planner, process_group=group,
                no_dist=group is None,
            )  # fmt: skip
        if not restore:
            return None, None
        made = restore[0]
        made.commit()
        if model_only:
            return None, None
        training = made.index.training
        rank = 0 if group is None else dist.get_rank(group)
        states = training.random.get(str(rank), training.random.get("0"))
        if states is not None:
            restore_random(states, self._device)
        return Progress(training.iterations, training.seed), decode(training.data, "data")

    # --- both ---------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for a save in the background, and lets the group go."""
        try:
            self.settle()
        finally:
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None

    def _ensure_group(self) -> Any:
        """A group of our own, so that a save in the background meets no other traffic; None
        where this process runs all ranks."""
        if len(self._workers) == self._transport.world_size:
            return None
        if self._group is None:
            self._group = dist.new_group(
                list(range(self._transport.world_size)),
                timeout=timedelta(seconds=self._timeout),
                backend="gloo",
            )
        return self._group

    def _watch(self, what: str | None) -> None:
        if self._watchdog is None:
            return
        if what is None:
            self._watchdog.end()
        else:
            rank = self._transport.ranks[0]
            self._watchdog.begin(lambda: f"Rank {rank}, {what},")

    @contextlib.contextmanager
    def _told(self, verb: str) -> Iterator[None]:
        """Raises an error of ours, the same on every rank, instead of DCP's."""
        try:
            with warnings.catch_warnings():
                # It warns of every save and load in a single process.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                yield
        except CheckpointException as error:
            raise self._cause(verb, error) from None
        except RuntimeError as error:
            if isinstance(error, PeerLostError) or not lost_contact(error):
                raise
            lost = PeerLostError(
                f"lost contact with another rank while it {verb}s a checkpoint: "
                f"{str(error).splitlines()[0]}"
            )
            raise self._explain(lost) from error

    def _cause(self, verb: str, error: CheckpointException) -> Exception:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, GraphPipeError):
            return cause
        if lost_contact(cause):
            return self._explain(PeerLostError(f"lost contact with another rank: {cause}"))
        text = f"Cannot {verb} the checkpoint: {type(cause).__name__}: {cause}"
        return CheckpointError(text.splitlines()[0], where=f"rank {rank}")


class _NamingWriter(FolderWriter):
    """Tells every rank the name that the checkpoint got."""

    def __init__(
        self,
        planner: PieceSavePlanner,
        begin: Callable[[], Path],
        finish: Callable[..., None],
        watch: Callable[[str | None], None],
        final: Sequence[Path],
    ) -> None:
        super().__init__(planner, begin, finish, watch)
        self._final = final

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        metadata.storage_meta = StorageMeta(checkpoint_id=str(self._final[0]))


def _unwatched(what: str | None) -> None:
    """The watchdog watches the thread that trains."""


def _now(make: Callable[[], Any]) -> Callable[[], Any]:
    """Calls ``make`` now; returns a function that gives its result, or raises its error."""
    try:
        value = make()
    except Exception as error:
        caught = error

        def fail() -> Any:
            raise caught

        return fail
    return lambda: value


def _known_errors(make: Callable[[], Any]) -> Any:
    """Errors of other kinds may not be picklable, and every rank is to see them."""
    try:
        return make()
    except GraphPipeError:
        raise
    except Exception as error:
        raise CheckpointError(f"{type(error).__name__}: {error}") from error
