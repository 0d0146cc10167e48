"""What fake runs at a few batch sizes say of an op, as functions of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import fx

from graphpipe.errors import CaptureError
from graphpipe.graph.expression import Expression
from graphpipe.graph.fake_run import FakeRun, Observation
from graphpipe.graph.fit import fitted
from graphpipe.graph.model_graph import Storage, TensorSpec, Work
from graphpipe.graph.normalise import origin_of
from graphpipe.graph.work import Counts


class Observed:
    """The runs of one graph.

    Attributes:
        inexact: Names of ops whose cost is no polynomial of the batch, of those asked for.

    Args:
        runs: Fake runs by the number of samples.
    """

    def __init__(self, runs: Mapping[int, FakeRun]) -> None:
        self._runs = runs
        self.smallest = runs[min(runs)]
        self.inexact: set[str] = set()

    def spec(self, node: fx.Node) -> TensorSpec:
        """Shape and dtype of the value of an op that gives one tensor.

        Raises:
            CaptureError: if a size is no polynomial of the number of samples.
        """
        observed = self._of(node)
        first = self.smallest.nodes[node].values[0]
        shape = []
        for dim in range(len(first.shape)):
            sizes = {b: seen.values[0].shape[dim] for b, seen in observed.items()}
            expression, exact = fitted(sizes)
            if not exact:
                raise CaptureError(
                    "A size is no polynomial of the number of samples",
                    where=f"{node.name}, module {origin_of(node).module!r}, "
                    f"{origin_of(node).source}",
                    got=", ".join(f"{size} at {b} samples" for b, size in sizes.items()),
                    fix="Keep the samples in a dimension of their own",
                )
            shape.append(expression)
        return TensorSpec(shape=tuple(shape), dtype=first.dtype, requires_grad=first.requires_grad)

    def work(self, node: fx.Node, direction: Literal["forward", "backward"]) -> Work:
        """Arithmetic and memory traffic of an op."""
        counts: dict[int, Counts] = {
            b: getattr(seen, direction) for b, seen in self._of(node).items()
        }
        return Work(
            flops=self._fit({b: c.flops for b, c in counts.items()}, node.name),
            bytes=self._fit({b: c.bytes for b, c in counts.items()}, node.name),
            kernels=max(c.kernels for c in counts.values()),
        )

    def saves(self, node: fx.Node) -> tuple[Storage, ...]:
        """Memory that an op keeps from its forward to its backward."""
        by_id: dict[str, dict[int, int]] = {}
        for samples, seen in self._of(node).items():
            for owner, size in seen.saves:
                by_id.setdefault(owner, {})[samples] = size
        return tuple(
            Storage(id=owner, bytes=self._fit(sizes, node.name)) for owner, sizes in by_id.items()
        )

    def _of(self, node: fx.Node) -> dict[int, Observation]:
        return {samples: run.nodes[node] for samples, run in self._runs.items()}

    def _fit(self, values: dict[int, int], where: str) -> Expression:
        expression, exact = fitted(values)
        if not exact:
            self.inexact.add(where)
        return expression
