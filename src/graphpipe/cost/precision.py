"""What autocast does to a graph: dtypes, casts and the bytes that follow from them.

A graph is captured in the dtype of the model, mostly float32. Under
``torch.autocast(dtype=bfloat16)`` matrix products and convolutions run in bfloat16, some
ops in float32, and the others in the widest dtype they read. This module follows these
rules (the op lists of PyTorch's documentation of ``torch.amp``) without running anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphpipe.cost.sizes import Size, fit, output_size
from graphpipe.errors import CostError
from graphpipe.graph.model_graph import DTYPE_BYTES, ModelGraph, Op

PRECISIONS = ("fp32", "tf32", "bf16", "bf16-mixed", "fp16-mixed")
"""``fp32``: as captured. ``tf32``: the same with TF32 allowed in matrix products. ``bf16``: the
model itself is bfloat16, so also as captured. ``*-mixed``: autocast."""

_IN_LOW = """
addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_transpose1d
conv_transpose2d conv_transpose3d convolution conv_tbc einsum gru gru_cell linear lstm lstm_cell
matmul mm mv multi_dot prelu rnn_relu rnn_tanh scaled_dot_product_attention
"""
_IN_FLOAT32 = """
acos asin cosh exp expm1 log log10 log1p log2 logsumexp pow reciprocal rsqrt sinh tan softplus
softmax log_softmax _softmax _log_softmax layer_norm native_layer_norm group_norm
native_group_norm norm frobenius_norm nuclear_norm linalg_vector_norm linalg_matrix_norm
cosine_similarity cosine_embedding_loss poisson_nll_loss nll_loss nll_loss_nd nll_loss2d
cross_entropy_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm cumsum cumprod sum
prod erfinv
"""
_WIDE = "partial_linear"
"""Multiplies in low precision and answers in float32, see :mod:`graphpipe.graph.partial`."""
_LOW = frozenset([*_IN_LOW.split(), _WIDE])
_HIGH = frozenset(_IN_FLOAT32.split())
_NARROWING = "join_sum"
"""Adds such answers up, and rounds their sum to what the linear would have given."""
_CONVOLUTIONS = frozenset(name for name in _LOW if name.startswith("conv"))
_FLOATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class OpPrecision:
    """How one op runs.

    Attributes:
        rate: Key of ``DeviceSpec.rates`` for its arithmetic.
        scale: Factor on the memory traffic that the graph states.
        cast_bytes: Traffic of casting its inputs and weights, forward.
        cast_kernels: Kernels of these casts.
        output: Bytes of its output.
        saves: Bytes that it keeps for its backward, by storage id.
    """

    rate: str
    scale: float
    cast_bytes: Size
    cast_kernels: int
    output: Size
    saves: Mapping[str, Size] = field(default_factory=dict)


def run_in(graph: ModelGraph, precision: str) -> list[OpPrecision]:
    """How every op of the graph runs under a precision.

    Raises:
        CostError: for an unknown precision.
    """
    if precision not in PRECISIONS:
        raise CostError("Unknown precision", expected=", ".join(PRECISIONS), got=repr(precision))
    low = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}.get(precision)
    if low is None:
        return [_as_captured(graph, op, precision) for op in graph.ops]
    dtypes: dict[str, str] = {item.name: item.spec.dtype for item in graph.inputs}
    return [_under_autocast(graph, op, low, dtypes) for op in graph.ops]


def _short(op: Op) -> str:
    """``linear`` of ``aten.linear.default``."""
    parts = op.target.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _own_dtype(graph: ModelGraph, op: Op) -> str:
    """The dtype of an op's output; of its first part where it is a tuple."""
    if op.output is not None:
        return op.output.dtype
    for other in graph.successors[graph.op_index[op.name]]:
        spec = graph.ops[other].output
        if spec is not None:
            return spec.dtype
    return "float32"


def _as_captured(graph: ModelGraph, op: Op, precision: str) -> OpPrecision:
    dtype = _own_dtype(graph, op)
    # PyTorch allows TF32 in convolutions, and in matrix products only when asked.
    if dtype == "float32" and (precision == "tf32" or _short(op) in _CONVOLUTIONS):
        rate = "tf32"
    else:
        rate = dtype
    saves = {item.id: fit(item.bytes) for item in op.saves}
    return OpPrecision(rate, 1.0, Size(), 0, output_size(op), saves)


def _under_autocast(graph: ModelGraph, op: Op, low: str, dtypes: dict[str, str]) -> OpPrecision:
    name, own = _short(op), _own_dtype(graph, op)
    read = [dtypes[item] for item in op.inputs]
    if own not in _FLOATS or own == "float64":
        runs = own
    elif name in _LOW or name == _NARROWING:
        runs = low
    elif name in _HIGH:
        runs = "float32"
    elif floats := [dtype for dtype in read if dtype in _FLOATS]:
        weights = [graph.parameter_by_name[item].dtype for item in op.parameters]
        # A normalisation keeps float32 weights and still answers in the dtype it reads.
        wide = floats if "norm" in name else floats + [item for item in weights if item in _FLOATS]
        runs = max(wide, key=lambda dtype: DTYPE_BYTES[dtype])
    else:
        runs = own
    answers = "float32" if name == _WIDE and runs == low else runs
    dtypes[op.name] = answers
    ratio = DTYPE_BYTES[answers] / DTYPE_BYTES[own] if own in DTYPE_BYTES else 1.0
    output = output_size(op).scaled(ratio)
    before, after, cast, kernels = Size(), Size(), Size(), 0
    for item, dtype in zip(op.inputs, read, strict=True):
        captured, size = _read(graph, item)
        before = before.plus(size)
        now = size.scaled(DTYPE_BYTES[dtype] / DTYPE_BYTES[captured])
        wanted = runs if name in _LOW | _HIGH and dtype in _FLOATS else dtype
        if wanted != dtype:
            small = now.scaled(DTYPE_BYTES[wanted] / DTYPE_BYTES[dtype])
            cast, kernels = cast.plus(now).plus(small), kernels + 1
            now = small
        after = after.plus(now)
    weights_cast = Size()
    for key in op.parameters:
        parameter = graph.parameter_by_name[key]
        whole = Size(float(parameter.nbytes))
        before = before.plus(whole)
        if name in _LOW and parameter.dtype in _FLOATS and parameter.dtype != low:
            small = whole.scaled(DTYPE_BYTES[low] / DTYPE_BYTES[parameter.dtype])
            cast, kernels = cast.plus(whole).plus(small), kernels + 1
            weights_cast = weights_cast.plus(small)
            whole = small
        after = after.plus(whole)
    before, after = before.plus(output_size(op)), after.plus(output)
    scale = after.at(8) / before.at(8) if before.at(8) > 0 else 1.0
    saves = _saves(graph, op, name in _LOW, low, dtypes)
    if weights_cast.fixed and op.requires_grad:
        # Autocast casts the weight anew in every forward and keeps the copy for the backward.
        saves[f"{op.name}.weight"] = weights_cast
    return OpPrecision(runs, scale, cast, kernels, output, saves)


def _read(graph: ModelGraph, name: str) -> tuple[str, Size]:
    """Dtype and bytes of a value as captured."""
    item = graph.input_by_name.get(name)
    if item is not None:
        nbytes = float(item.spec.nbytes(1))
        return item.spec.dtype, Size(0.0, nbytes) if item.per_sample else Size(nbytes)
    op = graph.op_by_name[name]
    return _own_dtype(graph, op), output_size(op)


def _saves(
    graph: ModelGraph, op: Op, is_low: bool, low: str, dtypes: Mapping[str, str]
) -> dict[str, Size]:
    """What the op keeps: its low-precision copies of inputs are its own, not shared."""
    kept: dict[str, Size] = {}
    for storage in op.saves:
        size = fit(storage.bytes)
        producer = graph.op_by_name.get(storage.id)
        captured = _own_dtype(graph, producer) if producer is not None else "float32"
        now = dtypes.get(storage.id, captured)
        if captured in _FLOATS:
            if is_low and storage.id != op.name and now in _FLOATS and now != low:
                kept[f"{storage.id}@{op.name}"] = size.scaled(
                    DTYPE_BYTES[low] / DTYPE_BYTES[captured]
                )
                continue
            size = size.scaled(DTYPE_BYTES[now] / DTYPE_BYTES[captured])
        kept[storage.id] = size
    return kept
