"""Makes the ranks agree on a call before any of them communicates for it.

Whether the inputs of a step fit, which variant of the graph they ask for and how many samples
they have is seen by each rank alone. Were one rank to refuse its inputs, or to see another
number of samples, the others would wait for its messages until the time-out. So every call
begins with one small reduction. It is under way while the first forwards run, and is waited
for before the first message; where the ranks disagree, all of them raise the same error, and
nothing has been sent: the pipeline can be used again.
"""

from __future__ import annotations

import pickle

import torch

from graphpipe.errors import GraphPipeError, InputError
from graphpipe.runtime.randomness import op_key
from graphpipe.runtime.transport import Eventually, Transport, Wait, wait

_FINE, _REFUSED = 0, 1


class Refusal(Exception):
    """The ranks agreed that a call is refused; ``error`` is what every rank raises."""

    def __init__(self, error: GraphPipeError) -> None:
        super().__init__(str(error))
        self.error = error


class Agreement:
    """One call of this rank, compared with what the other ranks were called with.

    Args:
        rank: This rank.
        transport: How it reaches the others.
        call: What was called, with everything that must be the same on every rank.
        error: Why this rank refuses the call, or None.
    """

    def __init__(
        self, rank: int, transport: Transport, call: str, error: GraphPipeError | None
    ) -> None:
        self._rank = rank
        self._transport = transport
        self._call = call
        self._error = error
        self._everyone = tuple(range(transport.world_size))
        key = op_key(call) >> 1
        # The largest key and the largest negated key are opposite only where all are equal.
        state = _FINE if error is None else _REFUSED
        self._votes = torch.tensor([state, key, -key], dtype=torch.int64)
        self._handle = transport.all_reduce(rank, self._everyone, self._votes, "max")
        self._settled = False

    def settle(self) -> Wait:
        """Waits for the votes of all ranks; at once where that was done.

        Raises:
            Refusal: on every rank, if any refused or was called with something else.
        """
        if self._settled:
            return
        while not self._handle.poll():
            yield
        self._settled = True
        state, high, low = self._votes.tolist()
        if state == _FINE and high == -low:
            return
        if state == _REFUSED:
            raise Refusal((yield from self._first_refusal()))
        raise Refusal((yield from self._difference()))

    def _first_refusal(self) -> Eventually[GraphPipeError]:
        """What the lowest rank that refused says."""
        root = yield from self._lowest(self._error is not None)
        own = b""
        if self._error is not None and self._rank == root:
            own = pickle.dumps(_at_rank(self._error, root))
        message = yield from self._spread(own, root)
        error: GraphPipeError = pickle.loads(message)
        return error

    def _difference(self) -> Eventually[GraphPipeError]:
        """Names the lowest rank that was called with something else than rank 0."""
        first = (yield from self._spread(self._call.encode(), 0)).decode()
        other = yield from self._lowest(first != self._call)
        second = (yield from self._spread(self._call.encode(), other)).decode()
        return InputError(
            "The ranks were not called with the same",
            where=f"rank {other}",
            expected=f"{first}, as on rank 0",
            got=second,
            fix="Call the same methods in the same order on every rank, with batches of the "
            "same shapes",
        )

    def _lowest(self, mine: bool) -> Eventually[int]:
        """The lowest rank for which ``mine`` holds."""
        number = torch.tensor([self._rank if mine else self._transport.world_size])
        yield from wait(self._transport.all_reduce(self._rank, self._everyone, number, "min"))
        return int(number)

    def _spread(self, own: bytes, root: int) -> Eventually[bytes]:
        """The bytes of rank ``root``, on every rank."""
        size = torch.tensor([len(own)])
        yield from wait(self._transport.broadcast(self._rank, self._everyone, size, root))
        content = torch.zeros(int(size), dtype=torch.uint8)
        if self._rank == root:
            content = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        yield from wait(self._transport.broadcast(self._rank, self._everyone, content, root))
        return bytes(content.tolist())


def _at_rank(error: GraphPipeError, rank: int) -> GraphPipeError:
    """The error, saying on which rank it was seen."""
    where = f"rank {rank}" if error.where is None else f"rank {rank}, {error.where}"
    return type(error)(
        error.what,
        where=where,
        expected=None if error.expected is None else str(error.expected),
        got=None if error.got is None else str(error.got),
        fix=error.fix,
    )
