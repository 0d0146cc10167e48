"""The transport over torch.distributed.

Operations go to the process group's own methods: they cost half of ``dist.isend`` and
``dist.irecv``, which matters at tens of messages a millisecond. Shapes
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
from graphpipe.runtime.local_links import FEW_RANKS, LocalLinks, connect
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
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    if device.type == "cuda" and not dist.is_nccl_available():
        raise RuntimeSetupError(
            "This build of torch has no NCCL",
            where=str(device),
            fix="Install a build of torch for CUDA, or run on the CPU",
        )
    return dist.get_world_size()


class ProcessGroupTransport:
    """Messages and collectives of this process over groups of its own.

    Groups of its own have the time-out that was asked for, and nothing that the user sends
    over the default group gets in between. CPU tensors go over gloo, short ones between ranks of
    one machine over :mod:`graphpipe.runtime.local_links`; on CUDA, tensors of the device go over
    NCCL, all point-to-point messages on one communicator.

    Args:
        groups: Every lane and set of ranks over which something will be reduced or broadcast,
            the same in every process (creating a group is a collective operation). The
            control lane of all ranks is always there.
        timeout: Seconds after which an operation that makes no progress fails.
        device: Where the tensors of stages live.
        pairs: Ordered pairs of ranks whose messages get a group (on CUDA: a communicator) of
            their own, the same in every process; the others share one.
    """

    def __init__(
        self,
        groups: Iterable[tuple[Lane, tuple[int, ...]]] = (),
        timeout: float = 1800.0,
        device: torch.device | None = None,
        pairs: Iterable[tuple[int, int]] = (),
    ) -> None:
        self.world_size = dist.get_world_size()
        self.rank = dist.get_rank()
        self.ranks: tuple[int, ...] = (self.rank,)
        self._timeout = timedelta(seconds=timeout)
        everyone = tuple(range(self.world_size))
        on_cuda = device is not None and device.type == "cuda"
        self._host: dict[tuple[Lane, tuple[int, ...]], Any] = {}
        self._device: dict[tuple[Lane, tuple[int, ...]], Any] = {}
        for lane, group in sorted({*groups, ("control", everyone)}):
            if len(group) > 1 or group == everyone:
                self._host[lane, group] = self._new_group(group, "gloo")
                if on_cuda:
                    self._device[lane, group] = self._new_group(group, "nccl")
        self._host_world = self._host["control", everyone]
        self._device_world: Any = self._device.get(("control", everyone))
        self._links = self._joint = LocalLinks({})
        self._reductions = 0
        self._pairs: dict[tuple[int, int], Any] = {}
        for pair in sorted(set(pairs)):
            made = self._new_group(pair, "nccl" if on_cuda else "gloo")
            if self.rank in pair:
                self._pairs[pair] = made
        self._on_cuda = on_cuda
        if not on_cuda and not self._pairs and self.world_size > 1:
            self._links = connect(self.rank, self.world_size, self._host_world, timeout)
            if self.world_size <= FEW_RANKS:
                self._joint = connect(self.rank, self.world_size, self._host_world, timeout)

    def _new_group(self, ranks: tuple[int, ...], backend: str) -> Any:
        return dist.new_group(list(ranks), timeout=self._timeout, backend=backend)

    def send(self, source: int, target: int, tensor: torch.Tensor, key: object) -> Handle:
        link = self._links.get(target, tensor)
        if link is not None:
            return link.send(tensor, key)
        group, peer = self._way(source, target, target, tensor)
        return _Work(group.send([tensor], peer, 0), tensor, key, f"rank {target}")

    def receive(self, source: int, target: int, into: torch.Tensor, key: object) -> Handle:
        link = self._links.get(source, into)
        if link is not None:
            return link.receive(into, key)
        group, peer = self._way(source, target, source, into)
        return _Work(group.recv([into], peer, 0), into, key, f"rank {source}")

    def _way(self, source: int, target: int, peer: int, tensor: torch.Tensor) -> tuple[Any, int]:
        """The group of a message, and the rank of ``peer`` in it."""
        pair = self._pairs.get((source, target))
        if pair is not None and tensor.is_cuda == self._on_cuda:
            return pair, int(peer == max(source, target))
        return (self._device_world if tensor.is_cuda else self._host_world), peer

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
        everyone = len(group) == self.world_size and lane == "control"
        if everyone and self._joint.reduces(self.world_size, tensor):
            self._reductions += 1
            return self._joint.all_reduce(rank, tensor, op, self._reductions)
        found = (self._device if tensor.is_cuda else self._host)[lane, group]
        work = found.allreduce([tensor], _OPS[op])
        return _Work(work, tensor, "an all-reduce", f"one of ranks {group}")

    def broadcast(
        self, rank: int, group: tuple[int, ...], tensor: torch.Tensor, root: int
    ) -> Handle:
        if len(group) == 1:
            return DONE
        found = (self._device if tensor.is_cuda else self._host)["control", group]
        work = dist.broadcast(tensor, root, group=found, async_op=True)
        return _Work(work, tensor, "a broadcast", f"one of ranks {group}")

    def close(self) -> None:
        """Destroys the groups; every process of the run must call it."""
        self._links.close()
        self._joint.close()
        for group in (*self._pairs.values(), *self._device.values(), *self._host.values()):
            dist.destroy_process_group(group)
        self._pairs.clear()
        self._device.clear()
        self._host.clear()
