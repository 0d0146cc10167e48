"""What a user may demand of a plan, besides memory and devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from graphpipe.errors import PlanError
from graphpipe.graph.model_graph import ModelGraph


@dataclass(frozen=True)
class Constraints:
    """Demands on a plan.

    Modules and ops are named by their paths (``text.layers.0``: the module with all it
    holds), by op names, or by patterns such as ``text.layers.*``.

    Attributes:
        together: Each entry's ops stay in one stage, so no cut goes through them.
        no_cut: Pairs (a, b): a and b share a stage with everything that lies between them.
        pin: Name to rank: its ops run on that device. The plan then has one copy.
        micro_batch: Name to samples: the stages that hold its ops run at this size.
    """

    together: Sequence[Sequence[str]] = ()
    no_cut: Sequence[tuple[str, str]] = ()
    pin: Mapping[str, int] = field(default_factory=dict)
    micro_batch: Mapping[str, int] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not (self.together or self.no_cut or self.pin or self.micro_batch)


@dataclass(frozen=True)
class Resolved:
    """Constraints by op position: sets that stay together, rank by op, size by op."""

    together: tuple[tuple[int, ...], ...]
    pin: dict[int, int]
    micro_batch: dict[int, int]

    @property
    def apart(self) -> dict[int, int]:
        """Labels for coarsening: ops with different pins or sizes never share a unit."""
        labels: dict[tuple[int | None, int | None], int] = {}
        ops = {*self.pin, *self.micro_batch}
        return {
            op: labels.setdefault((self.pin.get(op), self.micro_batch.get(op)), len(labels))
            for op in sorted(ops)
        }


def find_ops(graph: ModelGraph, name: str) -> tuple[int, ...]:
    """Positions of the ops that a name or pattern means, prep ops left out.

    Raises:
        PlanError: if there are none.
    """
    found = tuple(
        i
        for i, op in enumerate(graph.ops)
        if not op.prep
        and (
            op.name == name
            or op.module == name
            or op.module.startswith(name + ".")
            or fnmatchcase(op.module, name)
            or fnmatchcase(op.name, name)
        )
    )
    if not found:
        modules = sorted({op.module.split(".")[0] for op in graph.ops if op.module})
        raise PlanError(
            "A constraint names something that the model does not have",
            where=repr(name),
            expected="the path of a module, the name of an op, or a pattern",
            fix="Top-level modules are " + (", ".join(modules[:12]) or "none"),
        )
    return found


def resolve(graph: ModelGraph, constraints: Constraints, world_size: int) -> Resolved:
    """Looks all names up.

    Raises:
        PlanError: for a name that is not there, a rank that does not exist, a size below 1, or
            an op that is pinned to two ranks or sizes.
    """
    together = [
        tuple(sorted({i for name in names for i in find_ops(graph, name)}))
        for names in constraints.together
    ]
    together += [
        tuple(sorted({*find_ops(graph, first), *find_ops(graph, second)}))
        for first, second in constraints.no_cut
    ]
    pin: dict[int, int] = {}
    for name, rank in constraints.pin.items():
        if not 0 <= rank < world_size:
            raise PlanError(
                "A module is pinned to a device that does not exist",
                where=repr(name),
                expected=f"a rank from 0 to {world_size - 1}",
                got=rank,
            )
        _assign(graph, pin, find_ops(graph, name), rank, "device")
    sizes: dict[int, int] = {}
    for name, size in constraints.micro_batch.items():
        if size < 1:
            raise PlanError("A micro-batch has at least one sample", where=repr(name), got=size)
        _assign(graph, sizes, find_ops(graph, name), size, "micro-batch size")
    return Resolved(tuple(together), pin, sizes)


def _assign(
    graph: ModelGraph, table: dict[int, int], ops: Sequence[int], value: int, what: str
) -> None:
    for op in ops:
        if table.setdefault(op, value) != value:
            raise PlanError(
                f"Two constraints give an op a different {what}",
                where=graph.ops[op].name,
                expected=table[op],
                got=value,
            )
