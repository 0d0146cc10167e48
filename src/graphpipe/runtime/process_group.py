"""The transport over torch.distributed.

Point-to-point operations go to the process group's own ``send`` and ``recv``: they cost half
of ``dist.isend`` and ``dist.irecv``, which matters at tens of messages a millisecond. Shapes
and dtypes are agreed by the plan and checked before anything is issued, because gloo accepts
a short message or another dtype in silence and aborts the process on one that is too long.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from graphpipe.errors import RuntimeSetupError
from graphpipe.runtime.failures import PeerLostError
from graphpipe.runtime.transport import DONE, Handle, Lane, ReduceOp

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class _Work:
    """Wraps a Work; keeps the tensor alive, since dropping either cancels the transfer."""

    __slots__ = ("_key", "_peer", "_tensor", "_work")

    def __init__(self, work: Any, tensor: torch.Tensor, key: object, peer: object) -> None:
        self._work = work
        self._tensor: torch.Tensor | None = tensor
        self._key = key
        self._peer = peer

    def poll(self) -> bool:
        if self._tensor is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise PeerLostError(
                    f"lost contact with {self._peer} while waiting for {self._key}: "
                    f"{str(error).splitlines()[0]}"
                ) from error
            self._tensor = None
        return True


def ensure_process_group(device: torch.device, timeout: float) -> int:
    """Joins the process group that the launcher prepared; returns the world size.

    Raises:
        RuntimeSetupError: if the process was not started by a launcher.
    """
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise RuntimeSetupError(
                "This process does not know its rank",
                expected="RANK and WORLD_SIZE, as torchrun sets them",
                fix="Start with torchrun or graphpipe.launch, or pass transport='in_process' to "
                "run every rank in this process",
            )
        backend = "nccl" if device.type == "cuda" else "gloo"
        if backend == "nccl" and not dist.is_nccl_available():
            raise RuntimeSetupError("This build of torch has no NCCL", where=str(device))
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    return dist.get_world_size()


class ProcessGroupTransport:
    """Messages and collectives of this process over an initialised default process group.

    Args:
        groups: Every lane and set of ranks over which something will be reduced or broadcast,
            the same in every process (creating a group is a collective operation). The
            control lane of all ranks is always there.
        timeout: Seconds after which an operation that makes no progress fails.

    Raises:
        RuntimeSetupError: if torch.distributed has not been initialised.
    """

    def __init__(
        self, groups: Iterable[tuple[Lane, tuple[int, ...]]] = (), timeout: float = 1800.0
    ) -> None:
        self.world_size = dist.get_world_size()
        self.rank = dist.get_rank()
        self.ranks: tuple[int, ...] = (self.rank,)
        world = dist.group.WORLD
        assert world is not None
        self._world = world
        self._timeout = timedelta(seconds=timeout)
        everyone = tuple(range(self.world_size))
        self._groups: dict[tuple[Lane, tuple[int, ...]], Any] = {("control", everyone): world}
        for lane, group in sorted(set(groups)):
            if (lane, group) not in self._groups and len(group) > 1:
                made = dist.new_group(list(group), timeout=self._timeout)
                self._groups[lane, group] = made

    def send(self, source: int, target: int, tensor: torch.Tensor, key: object) -> Handle:
        return _Work(self._world.send([tensor], target, 0), tensor, key, f"rank {target}")

    def receive(self, source: int, target: int, into: torch.Tensor, key: object) -> Handle:
        return _Work(self._world.recv([into], source, 0), into, key, f"rank {source}")

    def all_reduce(
        self,
        rank: int,
        group: tuple[int, ...],
        tensor: torch.Tensor,
        op: ReduceOp = "sum",
        lane: Lane = "control",
    ) -> Handle:
        if len(group) == 1:
            return DONE
        work = dist.all_reduce(tensor, _OPS[op], group=self._groups[lane, group], async_op=True)
        return _Work(work, tensor, "an all-reduce", f"ranks {group}")

    def broadcast(
        self, rank: int, group: tuple[int, ...], tensor: torch.Tensor, root: int
    ) -> Handle:
        if len(group) == 1:
            return DONE
        work = dist.broadcast(tensor, root, group=self._groups["control", group], async_op=True)
        return _Work(work, tensor, "a broadcast", f"ranks {group}")

    def close(self) -> None:
        self._groups.clear()
