"""``ModelGraph``: the operators of a model and its loss, as data.

A model graph says everything that planning needs: operators, what each reads, the shapes
of what it produces as functions of the batch, the parameters it holds. It is saved as
JSON without the program. A graph that :func:`~graphpipe.graph.capture.capture` made also
carries the program (``graph.program``), from which the runtime builds stage modules; a graph read
from a file has ``program is None``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, model_validator

from graphpipe.errors import GraphError
from graphpipe.graph.expression import Expression, evaluate
from graphpipe.records import FileRecord, Record

if TYPE_CHECKING:
    from typing import Self

    from graphpipe.graph.program import Program

DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element, by the dtype's name without ``torch.``."""

BATCH_SIZE_INPUT = "micro_batch_size"
"""Name of the program's first placeholder: the micro-batch size, an integer."""


class TensorSpec(Record):
    """Shape and dtype of a tensor; dimensions are integers or expressions in ``b``."""

    shape: tuple[Expression, ...]
    dtype: str
    requires_grad: bool = False

    @property
    def rows_per_sample(self) -> int | None:
        """c where dimension 0 is ``c * b``; None where it does not depend on the batch."""
        if not self.shape or isinstance(self.shape[0], int):
            return None
        return evaluate(self.shape[0], 1)

    def concrete_shape(self, micro_batch: int) -> tuple[int, ...]:
        """The shape for a micro-batch of this many samples."""
        return tuple(evaluate(size, micro_batch) for size in self.shape)

    def nbytes(self, micro_batch: int) -> int:
        """Bytes of the tensor for a micro-batch of this many samples."""
        total = DTYPE_BYTES[self.dtype]
        for size in self.shape:
            total *= evaluate(size, micro_batch)
        return total

    @model_validator(mode="after")
    def _known_dtype(self) -> Self:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}")
        return self


class ParamSlice(Record):
    """Which part of a parameter of the model an entry of ``ModelGraph.parameters`` is.

    Attributes:
        of: Canonical name of the whole parameter.
        dim: Dimension along which it is cut.
        start: First index of the slice in that dimension.
        length: Its size there.
        full_shape: Shape of the whole parameter.
    """

    of: str
    dim: int
    start: int
    length: int
    full_shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The entry's name, as one would write the slice: ``joint.0.weight[:, 0:512]``."""
        before = ":, " * self.dim
        return f"{self.of}[{before}{self.start}:{self.start + self.length}]"


class JoinSplit(Record):
    """A weight that is cut where the concatenation that it multiplies was put together.

    Attributes:
        parameter: Canonical name of the weight.
        widths: Features that each slice of it multiplies, in the order of the concatenation.
    """

    parameter: str
    widths: tuple[int, ...]


class Parameter(Record):
    """A parameter or buffer of the model under its canonical name.

    The canonical name is the first of ``model.named_parameters()`` (or
    ``named_buffers()``); ``aliases`` are the other names of a tied parameter. Where a join was
    split (:func:`graphpipe.graph.split_joins.split_joins`), each ``slice`` of the weight is an
    entry of its own, named by :attr:`ParamSlice.name`, and the slices of a parameter stand
    together, in order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    is_buffer: bool = False
    persistent: bool = True
    aliases: tuple[str, ...] = ()
    slice: ParamSlice | None = None

    @property
    def canonical(self) -> str:
        """Name of the model's own parameter: that of the whole, for a slice."""
        return self.name if self.slice is None else self.slice.of

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


class GraphInput(Record):
    """A tensor that the caller gives: one leaf of (args, kwargs, targets).

    ``path`` is its place, such as ``args[0]``, ``kwargs['mask']`` or ``targets``.
    ``per_sample`` inputs are cut along dimension 0 by each stage's own micro-batch size;
    the others are replicated.
    """

    name: str
    path: str
    spec: TensorSpec
    per_sample: bool = True


class Storage(Record):
    """Memory that an op keeps from its forward to its backward.

    Ops that keep the same memory name the same ``id`` (count each once); parameters and
    buffers are not listed.
    """

    id: str
    bytes: Expression


class Work(Record):
    """Arithmetic and memory traffic of one direction of an op, as functions of ``b``."""

    flops: Expression = 0
    bytes: Expression = 0
    kernels: int = 0


class Op(Record):
    """One operator.

    Attributes:
        name: Unique; the name of its node in the program.
        target: The operator, such as ``aten.addmm.default``.
        key: Stable identity across variants: module path, call index, operator.
        module: Path of the module that called it, such as ``text.layers.0.attention``.
        source: ``file:line`` in the user's code where known, else empty.
        inputs: Names of the ops and graph inputs whose values it reads, without repeats.
        parameters: Canonical names of the parameters and buffers that it reads.
        mutates: Canonical names of the buffers that its forward changes.
        output: What it produces; None for a tuple (its ``getitem`` ops follow it in the
            same group) or for an integer.
        requires_grad: Whether a gradient flows back into the op (it has a backward).
        prep: Cheap, without parameters and randomness, and a function of inputs that every
            consumer can have: each consuming stage computes it again, it is never sent.
        coupled: Its value for one sample depends on the other samples of the micro-batch.
        random: It draws random numbers.
        random_key: Key that seeds it where that is not ``key``: the pieces of a dropout draw
            the numbers of the whole.
        crossable: Its output may be sent to another stage.
        group: Ops with the same number must stay in one stage; None for a free op.
    """

    name: str
    target: str
    key: str
    module: str = ""
    source: str = ""
    inputs: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    output: TensorSpec | None = None
    requires_grad: bool = False
    prep: bool = False
    coupled: bool = False
    random: bool = False
    random_key: str | None = None
    crossable: bool = True
    group: int | None = None
    forward: Work = Work()
    backward: Work = Work()
    saves: tuple[Storage, ...] = ()


class LossTerm(Record):
    """One addend of the loss, a sink of the graph.

    The mini-batch's loss is the sum over the terms of

    ========================  ================================================
    ``reduction``             contribution of the micro-batches
    ========================  ================================================
    ``mean``                  sum of value * b / B
    ``sum``                   sum of value
    ``sum_count``             (sum of value) / n, n from ``count_op``, see below
    ``batch_free``            sum of value * b / B (the value is the same for all)
    ``coupled``               value itself if b = B, else as ``mean``
    ========================  ================================================

    times ``sign`` (1.0 or -1.0).

    For ``sum_count`` the sum of ``count_op``'s value over the micro-batches gives
    ``n = max(sum + count_offset, count_min)``. Where ``count_from_inputs`` holds, the count
    depends on nothing but graph inputs, so it is known before the first forward; else only
    after all forwards of the ops it reads.
    """

    op: str
    reduction: Literal["mean", "sum", "sum_count", "batch_free", "coupled"]
    count_op: str | None = None
    count_from_inputs: bool = True
    count_offset: float = 0.0
    count_min: float | None = None
    sign: float = 1.0


class BatchCondition(Record):
    """A micro-batch size that an op does not accept although its graph is for any size.

    The model's Python code refuses it (``BatchNorm1d`` cannot train on one sample), and that
    check is no operator. A stage that holds ``op`` needs at least ``min_samples`` samples in
    every micro-batch, the last one included.
    """

    op: str
    min_samples: int
    message: str


class ModelGraph(FileRecord):
    """The operators of a model and its loss for one mode and one input signature.

    ``ops`` are in a topological order. See :class:`Op` for the fields.
    """

    file_kind: ClassVar[str] = "graphpipe-graph"
    written_by: ClassVar[str] = "graphpipe capture MODEL -o FILE"
    file_version: ClassVar[int] = 1

    kind: str = file_kind
    version: int = file_version
    name: str
    training: bool = True
    inputs: tuple[GraphInput, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    ops: tuple[Op, ...]
    loss_terms: tuple[LossTerm, ...] = ()
    batch_conditions: tuple[BatchCondition, ...] = ()
    outputs: tuple[str, ...] = ()
    """Names of the ops whose values the model returns (for ``predict``), in leaf order."""
    input_structure: str = ""
    """Structure of (args, kwargs, targets), as ``torch.utils._pytree`` writes it in JSON."""
    output_structure: str = ""
    """Structure of the model's output with the leaves in the order of ``outputs``."""
    torch_version: str = ""
    warnings: tuple[str, ...] = Field(default=())

    _program: Program | None = PrivateAttr(default=None)

    @property
    def program(self) -> Program | None:
        """The executable form, where this graph was captured in this process."""
        return self._program

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields changed; what is derived from them is computed anew."""
        copy = super().model_copy(update=update, deep=deep)
        for name in set(copy.__dict__) - set(type(self).model_fields):
            del copy.__dict__[name]
        return copy

    def broken_conditions(self, ops: Iterable[str], samples: int) -> tuple[BatchCondition, ...]:
        """The batch conditions of these ops that a micro-batch of ``samples`` breaks."""
        names = set(ops)
        return tuple(
            condition
            for condition in self.batch_conditions
            if condition.op in names and samples < condition.min_samples
        )

    def __str__(self) -> str:
        from graphpipe.graph.printing import graph_text

        return graph_text(self)

    def attach_program(self, program: Program) -> None:
        """Ties the executable form to the graph (done once, by ``capture``)."""
        assert self._program is None
        self._program = program

    @cached_property
    def op_by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def input_by_name(self) -> dict[str, GraphInput]:
        return {item.name: item for item in self.inputs}

    @cached_property
    def parameter_by_name(self) -> dict[str, Parameter]:
        return {item.name: item for item in self.parameters}

    @cached_property
    def op_index(self) -> dict[str, int]:
        """Position of each op in ``ops``."""
        return {op.name: i for i, op in enumerate(self.ops)}

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the positions of the ops that it reads, ascending."""
        index = self.op_index
        return tuple(
            tuple(sorted({index[name] for name in op.inputs if name in index})) for op in self.ops
        )

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each op, the positions of the ops that read it, ascending."""
        out: list[list[int]] = [[] for _ in self.ops]
        for i, sources in enumerate(self.predecessors):
            for j in sources:
                out[j].append(i)
        return tuple(tuple(items) for items in out)

    @cached_property
    def joins(self) -> tuple[JoinSplit, ...]:
        """The joins that were split in this graph, by their weights, in model order."""
        widths: dict[str, list[int]] = {}
        for item in self.parameters:
            if item.slice is not None:
                widths.setdefault(item.slice.of, []).append(item.slice.length)
        return tuple(
            JoinSplit(parameter=name, widths=tuple(sizes)) for name, sizes in widths.items()
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that costs and plans depend on, 16 hexadecimal digits.

        Where in a source file an op stands is not part of it: a comment added there changes
        no plan. What a slice is of, and what seeds a piece, follows from their names and keys.
        """
        text = self.model_dump_json(
            exclude={
                "warnings": True,
                "torch_version": True,
                "ops": {"__all__": {"source", "random_key"}},
                "parameters": {"__all__": {"slice"}},
            }
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.ops:
            raise ValueError("the graph has no ops")
        seen: set[str] = {item.name for item in self.inputs}
        if len(seen) != len(self.inputs):
            raise ValueError("two inputs have the same name")
        parameters = {item.name for item in self.parameters}
        if len(parameters) != len(self.parameters):
            raise ValueError("two parameters have the same name")
        names = {op.name for op in self.ops}
        for op in self.ops:
            if op.name in seen:
                raise ValueError(f"op {op.name!r} is there twice, or an input has its name")
            for source in op.inputs:
                if source not in seen:
                    why = "comes later: a cycle or a wrong order" if source in names else "unknown"
                    raise ValueError(f"op {op.name!r} reads {source!r}, which is {why}")
            for parameter in (*op.parameters, *op.mutates):
                if parameter not in parameters:
                    raise ValueError(f"op {op.name!r} uses an unknown parameter {parameter!r}")
            try:
                _expressions_hold(op)
            except GraphError as error:
                raise ValueError(f"op {op.name!r}: {error}") from None
            seen.add(op.name)
        for term in self.loss_terms:
            for name in (term.op, term.count_op):
                if name is not None and name not in names:
                    raise ValueError(f"loss term names an unknown op {name!r}")
        for condition in self.batch_conditions:
            if condition.op not in names:
                raise ValueError(f"a batch condition names an unknown op {condition.op!r}")
        for name in self.outputs:
            if name not in seen:
                raise ValueError(f"output names an unknown op {name!r}")
        return self


def _expressions_hold(op: Op) -> None:
    sizes: list[Expression] = [op.forward.flops, op.forward.bytes]
    sizes += [op.backward.flops, op.backward.bytes]
    sizes += [storage.bytes for storage in op.saves]
    if op.output is not None:
        sizes += op.output.shape
    for size in sizes:
        if evaluate(size, 2) < 0:
            raise GraphError(f"size {size!r} is negative at b = 2")
