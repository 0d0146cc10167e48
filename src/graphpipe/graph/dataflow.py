"""Finds out, op by op, where the samples are and which ops mix them.

The rules are by op (``flow_*.py``). Ops that torch tags as element-wise need none. An op
without a rule that reads something that depends on the samples counts as one that mixes
them: a stage that holds it may then be given the whole mini-batch, which is always right.
"""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphpipe.graph import flow_compute as compute
from graphpipe.graph import flow_reduce as reductions
from graphpipe.graph import flow_shapes as shapes
from graphpipe.graph.autocast import operator_of
from graphpipe.graph.fake_run import FakeRun
from graphpipe.graph.flow import (
    FREE,
    MIXED,
    Call,
    Flow,
    Kind,
    Number,
    Result,
    Size,
    Value,
    depends,
    leaves_of,
    rows,
)
from graphpipe.graph.flow_pointwise import COPIES, pointwise
from graphpipe.graph.normalise import origin_of

Rule = Callable[[Call], Result]


def _table(groups: Mapping[Rule, str]) -> dict[str, Rule]:
    return {name: rule for rule, names in groups.items() for name in names.split()}


RULES: dict[str, Rule] = _table(
    {
        pointwise: " ".join(sorted(COPIES))
        + " __and__ __or__ __xor__ floor_divide floor_divide_ masked_fill_ prelu dropout dropout_"
        " native_dropout alpha_dropout feature_dropout feature_alpha_dropout bernoulli bernoulli_"
        " normal_ uniform_ random_ exponential_ hardswish hardswish_ silu silu_ bucketize"
        " clamp clamp_ clip fake_quantize_per_tensor_affine where nan_to_num square float_power"
        " log_sigmoid softsign hardsigmoid threshold native_dropout_backward poisson"
        " tanhshrink hardshrink softshrink rrelu rrelu_ rand_like randn_like complex polar",
        shapes.reshape: "view reshape flatten unflatten _unsafe_view view_as reshape_as ravel"
        " _reshape_alias",
        shapes.permute: "permute transpose transpose_ t t_ movedim moveaxis swapaxes swapdims"
        " numpy_T mT adjoint mH",
        shapes.unsqueeze: "unsqueeze unsqueeze_",
        shapes.squeeze: "squeeze squeeze_",
        shapes.expand: "expand expand_as broadcast_to",
        shapes.repeat: "repeat tile",
        shapes.repeat_interleave: "repeat_interleave",
        shapes.cat: "cat concat concatenate",
        shapes.stack: "stack",
        shapes.cut: "slice narrow split split_with_sizes chunk tensor_split unsafe_split"
        " unsafe_chunk",
        shapes.select: "select unbind",
        shapes.diagonal: "diagonal",
        shapes.matrix_wise: "tril triu tril_ triu_",
        shapes.pad: "pad constant_pad_nd",
        shapes.created: "zeros ones full empty eye tril_indices triu_indices rand randn randint"
        " new_zeros new_ones new_full new_empty scalar_tensor",
        shapes.whole: "histc bincount unique _unique2 unique_dim nonzero",
        shapes.like: "zeros_like ones_like full_like empty_like",
        shapes.arange: "arange",
        shapes.reordered: "flip roll fliplr flipud",
        shapes.one_hot: "one_hot",
        shapes.written: "copy_ fill_ zero_",
        reductions.reduce: "sum nansum mean amax amin max min argmax argmin any all prod var std"
        " norm linalg_vector_norm median count_nonzero logsumexp std_mean var_mean nanmean"
        " linalg_norm aminmax",
        reductions.along: "softmax log_softmax _softmax _log_softmax cumsum cumprod sort argsort"
        " topk diff logcumsumexp cummax cummin glu softmin kthvalue",
        reductions.loss: "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss"
        " smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div"
        " soft_margin_loss poisson_nll_loss hinge_embedding_loss margin_ranking_loss"
        " cosine_embedding_loss multi_margin_loss multilabel_margin_loss triplet_margin_loss"
        " gaussian_nll_loss",
        reductions.distance: "cosine_similarity pairwise_distance",
        compute.linear: "linear",
        compute.matmul: "matmul mm bmm mv dot addmm baddbmm addmv addbmm __matmul__",
        compute.einsum: "einsum",
        compute.leading: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
        " convolution _convolution max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d"
        " avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"
        " adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d _adaptive_avg_pool2d"
        " max_pool2d_with_indices max_pool1d_with_indices max_pool3d_with_indices group_norm"
        " native_group_norm upsample_nearest1d upsample_nearest2d upsample_nearest3d"
        " upsample_bilinear2d upsample_bicubic2d upsample_linear1d upsample_trilinear3d"
        " _upsample_bilinear2d_aa _upsample_bicubic2d_aa pixel_shuffle pixel_unshuffle"
        " channel_shuffle im2col col2im unfold_backward grid_sampler grid_sampler_2d"
        " affine_grid_generator reflection_pad1d reflection_pad2d replication_pad1d"
        " replication_pad2d replication_pad3d lp_pool2d max_unpool2d bilinear",
        compute.batch_norm: "batch_norm native_batch_norm cudnn_batch_norm instance_norm",
        compute.layer_norm: "layer_norm native_layer_norm rms_norm",
        compute.attention: "scaled_dot_product_attention",
        compute.embedding: "embedding",
        compute.embedding_bag: "embedding_bag _embedding_bag",
        compute.recurrent: "lstm gru rnn_tanh rnn_relu",
        compute.index: "index",
        compute.index_select: "index_select",
        compute.gather: "gather scatter scatter_ scatter_add scatter_add_ scatter_reduce"
        " scatter_reduce_ take_along_dim index_fill",
        compute.index_put: "index_put index_put_ _index_put_impl_",
        compute.embedding_like_distance: "cdist",
        compute.coupling: "masked_scatter masked_scatter_",
    }
)


class Declared:
    """Ops that the user declares not to mix samples: op names, operators, module paths.

    Patterns such as ``layers.*.experts`` are allowed. Within a declared module the samples
    may go any way (tokens sorted by expert); only what leaves it has its rows in order.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._patterns = tuple(patterns)
        self.used: set[str] = set()

    @property
    def unused(self) -> tuple[str, ...]:
        """Patterns that matched nothing."""
        return tuple(pattern for pattern in self._patterns if pattern not in self.used)

    def holds(self, node: fx.Node) -> bool:
        """Whether an op is declared."""
        return bool(self._named(node)) or self._scope(node) is not None

    def leaves(self, node: fx.Node) -> bool:
        """Whether the value of a declared op is read outside of the declared module."""
        if self._named(node):
            return True
        scope = self._scope(node)
        return not node.users or any(self._scope(user) != scope for user in node.users)

    def _named(self, node: fx.Node) -> bool:
        target, _, _ = operator_of(node)
        return any(self._match(name) for name in (node.name, str(target)))

    def _scope(self, node: fx.Node) -> str | None:
        parts = origin_of(node).module.split(".")
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            if path and self._match(path):
                return path
        return None

    def _match(self, name: str) -> bool:
        for pattern in self._patterns:
            if fnmatch.fnmatchcase(name, pattern):
                self.used.add(pattern)
                return True
        return False


@dataclass(frozen=True)
class DataFlow:
    """The result of the analysis.

    Attributes:
        flows: Flow of each tensor value, by node; of the first output for a tuple.
        coupled: Nodes whose op mixes the samples.
        unknown: Nodes that count as mixing them because their op has no rule.
        dims: Dimensions of each tensor value.
        dtypes: Its dtype.
        gradients: Nodes whose value needs a gradient.
    """

    flows: dict[fx.Node, Flow]
    coupled: frozenset[fx.Node]
    unknown: frozenset[fx.Node]
    dims: dict[fx.Node, tuple[Size, ...]]
    dtypes: dict[fx.Node, str]
    gradients: frozenset[fx.Node]


def analyse(
    graph: fx.Graph,
    small: FakeRun,
    large: FakeRun,
    rows_of_inputs: Mapping[fx.Node, int],
    per_sample: Declared,
) -> DataFlow:
    """Follows the samples through ``graph``.

    Args:
        graph: A normalised graph.
        small: A fake run of it.
        large: One with one sample more.
        rows_of_inputs: Rows per sample of the inputs that are cut.
        per_sample: Ops that the user has declared not to mix the samples.
    """
    return _Analysis(graph, small, large, rows_of_inputs, per_sample).run()


class _Analysis:
    def __init__(
        self,
        graph: fx.Graph,
        small: FakeRun,
        large: FakeRun,
        rows_of_inputs: Mapping[fx.Node, int],
        per_sample: Declared,
    ) -> None:
        assert large.samples == small.samples + 1
        self._graph = graph
        self._small = small
        self._large = large
        self._rows = rows_of_inputs
        self._declared = per_sample
        self._flows: dict[fx.Node, tuple[Flow, ...]] = {}
        self._dims: dict[fx.Node, tuple[tuple[Size, ...], ...]] = {}
        self._coupled: set[fx.Node] = set()
        self._unknown: set[fx.Node] = set()
        self._of_storage: dict[int, set[fx.Node]] = {}

    def run(self) -> DataFlow:
        for node in self._graph.nodes:
            if node.op == "output" or node not in self._small.nodes:
                continue
            self._dims[node] = self._sizes(node)
            if not self._dims[node]:
                continue
            self._visit(node)
            for value in self._small.nodes[node].values:
                self._of_storage.setdefault(value.storage, set()).add(node)
            self._spread(node)
        return DataFlow(
            {node: flows[0] for node, flows in self._flows.items() if flows},
            frozenset(self._coupled),
            frozenset(self._unknown),
            {node: sizes[0] for node, sizes in self._dims.items() if sizes},
            {node: seen.values[0].dtype for node, seen in self._small.nodes.items() if seen.values},
            frozenset(
                node
                for node, seen in self._small.nodes.items()
                if any(value.requires_grad for value in seen.values)
            ),
        )

    def _sizes(self, node: fx.Node) -> tuple[tuple[Size, ...], ...]:
        pairs = zip(self._small.nodes[node].values, self._large.nodes[node].values, strict=True)
        return tuple(
            tuple(self._size(a, b) for a, b in zip(x.shape, y.shape, strict=True)) for x, y in pairs
        )

    def _size(self, small: float, large: float) -> Size:
        factor = large - small
        constant = small - self._small.samples * factor
        if factor != int(factor) or constant != int(constant):
            return None
        return (int(factor), int(constant))

    def _visit(self, node: fx.Node) -> None:
        outputs = self._dims[node]
        if node.op == "placeholder":
            count = self._rows.get(node, 0)
            self._flows[node] = (rows(0, 1, count) if count else FREE,)
            return
        if node.op == "get_attr":
            self._flows[node] = (FREE,)
            return
        if node.target is operator.getitem:
            self._flows[node] = (self._item(node),)
            return
        declared = self._declared.holds(node)
        result = self._applied(node, outputs, declared)
        flows = tuple(
            self._checked(flow, dims) for flow, dims in zip(result.flows, outputs, strict=False)
        )
        flows += (MIXED,) * (len(outputs) - len(flows))
        coupled = result.coupled or any(
            new.kind is Kind.MIXED and old.kind is not Kind.MIXED
            for new, old in zip(flows, result.flows, strict=False)
        )
        if declared and self._declared.leaves(node):
            flows = tuple(
                self._declared_flow(flow, dims) for flow, dims in zip(flows, outputs, strict=True)
            )
        coupled = coupled and not declared
        self._flows[node] = flows
        if coupled:
            self._coupled.add(node)

    def _declared_flow(self, flow: Flow, dims: tuple[Size, ...]) -> Flow:
        if flow.kind is not Kind.MIXED:
            return flow
        found = [d for d, size in enumerate(dims) if depends(size)]
        if not found:
            return FREE
        size = dims[found[0]]
        if len(found) == 1 and size is not None and not size[1]:
            return rows(found[0], 1, size[0])
        return flow

    def _applied(
        self, node: fx.Node, outputs: tuple[tuple[Size, ...], ...], declared: bool
    ) -> Result:
        target, args, kwargs = operator_of(node)
        name = getattr(target, "_opname", getattr(target, "__name__", str(target)))
        arguments = self._arguments(target, args, kwargs)
        tags = frozenset(str(tag).rsplit(".", 1)[-1] for tag in getattr(target, "tags", ()))
        call = Call(name, arguments, outputs, tags, leaves_of(arguments))
        is_aten = getattr(target, "namespace", "") == "aten"
        rule = RULES.get(name) if is_aten else None
        if rule is None and "pointwise" in tags:
            rule = pointwise
        if rule is None:
            return self._without_rule(node, call, declared)
        if name == "bernoulli" and not list(call.values()):
            rule = shapes.created
        return rule(call)

    def _without_rule(self, node: fx.Node, call: Call, declared: bool) -> Result:
        depend = any(v.flow.kind is not Kind.FREE or v.flow.power for v in call.values())
        depend = depend or bool(list(call.numbers()))
        batched = any(depends(size) for dims in call.outputs for size in dims)
        if not depend and not batched:
            return Result((FREE,) * len(call.outputs))
        if not declared:
            self._unknown.add(node)
        flows = tuple(self._declared_flow(MIXED, dims) for dims in call.outputs)
        if node.op == "call_module" or "pt2_compliant_tag" not in call.tags:
            # A whole module or a custom op: rows in, rows out, but it may look across them.
            kept = tuple(f if f.kind is Kind.ROWS and f.dim == 0 else MIXED for f in flows)
            return Result(kept, coupled=True)
        return Result((MIXED,) * len(call.outputs), coupled=True)

    def _arguments(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        schema = getattr(target, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        names += [f"arg{i}" for i in range(len(names), len(args))]
        given = dict(zip(names, args, strict=False))
        given.update(kwargs)
        if schema is not None:
            for argument in schema.arguments:
                if argument.has_default_value():
                    given.setdefault(argument.name, argument.default_value)
        converted: dict[str, Any] = fx.node.map_aggregate(given, self._converted)
        return converted

    def _converted(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        if self._flows.get(value):
            seen = self._small.nodes[value].values[0]
            return Value(self._flows[value][0], self._dims[value][0], seen.dtype)
        small, large = self._small.nodes[value].number, self._large.nodes[value].number
        if isinstance(small, (int, float)) and isinstance(large, (int, float)):
            if small == large:
                return small
            return Number(self._size(small, large))
        return value

    def _item(self, node: fx.Node) -> Flow:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        flows = self._flows.get(source, ())
        positions = self._small.nodes[source].positions
        for flow, position in zip(flows, positions, strict=True):
            if position == node.args[1]:
                return flow
        return MIXED

    def _checked(self, flow: Flow, dims: tuple[Size, ...]) -> Flow:
        """A rule's answer, or MIXED where the shape says otherwise."""
        found = [d for d, size in enumerate(dims) if depends(size)]
        if flow.batched:
            expected = (flow.outer * flow.inner, 0)
            fits = found == [flow.dim] and dims[flow.dim] == expected
            return flow if fits else MIXED
        return MIXED if found else flow

    def _spread(self, node: fx.Node) -> None:
        """What is written in place holds for every view of that storage."""
        written = self._small.nodes[node].mutates
        if not written or not self._flows.get(node):
            return
        if self._flows[node][0].kind is Kind.MIXED:
            for storage in written:
                for alias in self._of_storage.get(storage, ()):
                    if alias.op != "get_attr":
                        self._flows[alias] = tuple(MIXED for _ in self._flows[alias])
