"""``capture``: an unchanged ``nn.Module`` and its loss become a :class:`ModelGraph`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx, nn

from graphpipe.errors import CaptureError
from graphpipe.graph.assemble import Captured, assemble
from graphpipe.graph.autocast import operator_of
from graphpipe.graph.dataflow import DataFlow, Declared, analyse
from graphpipe.graph.fake_run import FakeRun, TensorShape, fake_run
from graphpipe.graph.fit import SAMPLE_SIZES
from graphpipe.graph.loss_terms import Term, split_loss
from graphpipe.graph.masked import write_with_masks
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.graph.normalise import Normal, normalise
from graphpipe.graph.opaque import OpaqueCalls, OpaqueOption
from graphpipe.graph.recipe import Recipe
from graphpipe.graph.signature import Signature, read_signature
from graphpipe.graph.tracing import LOSS_PREFIX, MODEL_PREFIX, LossFunction, names_of, trace

aten = torch.ops.aten


class CoupledBatchWarning(UserWarning):
    """Some ops mix the samples of a micro-batch."""


def capture(
    model: nn.Module,
    args: Sequence[object] | torch.Tensor,
    kwargs: Mapping[str, object] | None = None,
    *,
    targets: object = None,
    loss_fn: LossFunction | None = None,
    name: str | None = None,
    training: bool = True,
    not_per_sample: Iterable[str] = (),
    rows_per_sample: Mapping[str, int] | None = None,
    per_sample_ops: Iterable[str] = (),
    reduction: str | Mapping[str, str] | None = None,
    opaque: OpaqueOption = (),
) -> ModelGraph:
    """The operators of ``model`` and its loss, for any number of samples.

    Nothing is executed; the model and the examples may be on the ``meta`` device. The graph's
    program keeps the model's own ``nn.Parameter`` objects.

    Args:
        model: The module, unchanged.
        args: Example positional inputs, with at least two samples; only shapes matter.
        kwargs: Example keyword inputs.
        targets: Example targets, handed to ``loss_fn`` and cut like the inputs.
        loss_fn: ``loss_fn(model(*args, **kwargs), targets)`` gives a scalar; or a pair
            (sum, count), whose quotient over the mini-batch is the loss; or a dict of scalars
            that add up. Without targets it may take the output alone. None: the model returns
            its loss (a scalar, or the entry ``loss`` of a dict), or there is none.
        name: Name of the graph; the class of the model by default.
        training: Training or evaluation mode. A model in the other mode is switched for the
            time of the capture. In evaluation mode nothing needs a gradient.
        not_per_sample: Inputs that belong to no sample and go whole to every micro-batch: by
            path (``kwargs['class_weight']``) or by the name of the parameter.
        rows_per_sample: Inputs with several rows for each sample, such as ``{"images": 8}``;
            the rows of a sample lie together.
        per_sample_ops: Ops declared not to mix samples: names of ops, of operators
            (``aten.masked_scatter.default``) or paths of modules, patterns such as
            ``layers.*.experts`` included.
        reduction: How the loss adds up over micro-batches (``mean``, ``sum``, ``sum_count``,
            ``batch_free``, ``coupled``), for the whole loss or by the keys of the dict that
            ``loss_fn`` returns. By default it follows from the data flow.
        opaque: Modules that stay one op and run as Python: paths or classes; or a dict from
            path to a function of the module's arguments that gives tensors of the right shapes.

    Raises:
        CaptureError: if the model cannot be captured, or not without changing its meaning; the
            message names module, line and remedy.
    """
    given = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    _check(model, loss_fn, training)
    signature = read_signature(
        model,
        given,
        kwargs or {},
        targets,
        not_per_sample=not_per_sample,
        rows_per_sample=rows_per_sample,
    )
    names = names_of(model, loss_fn)
    calls = OpaqueCalls(model, opaque)
    traced = trace(model, signature, loss_fn, training=training, opaque=calls)
    write_with_masks(traced.module.graph)
    normal = normalise(traced, signature, names, model)
    tensors = _tensors(model, loss_fn, normal)
    work = _Workshop(normal, signature, tensors, names, training, Declared(per_sample_ops))
    terms = work.prepare(traced.loss_names, reduction)
    captured = Captured(
        name=name or type(model).__name__,
        training=training,
        model=model,
        loss_fn=loss_fn if isinstance(loss_fn, nn.Module) else None,
        signature=signature,
        trace=traced,
        normal=normal,
        terms=terms,
        runs=work.observe(),
        flow=work.flow(),
        tensors=tensors,
        shapes=work.state,
    )
    graph = assemble(captured)
    _warn(graph)
    return graph


def _check(model: nn.Module, loss_fn: LossFunction | None, training: bool) -> None:
    if not isinstance(model, nn.Module):
        raise CaptureError("The model is not an nn.Module", got=type(model).__name__)
    for path, module in model.named_modules():
        cumulative = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None
        if training and cumulative and module.track_running_stats:
            raise CaptureError(
                "A BatchNorm averages over all the batches that it has seen: how much a batch "
                "weighs is a number that every stage and replica would have to count alike",
                where=f"module {path!r}",
                expected="a momentum, such as 0.1",
                got="momentum=None",
                fix="Give it a momentum, or track_running_stats=False",
            )
    if isinstance(loss_fn, nn.Module):
        trainable = [name for name, p in loss_fn.named_parameters() if p.requires_grad]
        if trainable:
            raise CaptureError(
                "The loss function has trainable parameters, which no optimizer would see",
                where=", ".join(trainable),
                fix="Make the loss a submodule of the model and return the loss from it",
            )


def _warn(graph: ModelGraph) -> None:
    for text in graph.warnings:
        warnings.warn(text, CoupledBatchWarning, stacklevel=3)


def _tensors(
    model: nn.Module, loss_fn: LossFunction | None, normal: Normal
) -> dict[str, torch.Tensor]:
    """Parameters, buffers and constants by canonical name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for source, prefix in ((model, ""), (loss_fn, LOSS_PREFIX)):
        if not isinstance(source, nn.Module):
            continue
        for name, tensor in (*source.named_parameters(), *source.named_buffers()):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[prefix + name] = tensor
    found.update(normal.constants)
    return found


class _Workshop:
    """Prepares the graph of one capture and observes it at several batch sizes."""

    def __init__(
        self,
        normal: Normal,
        signature: Signature,
        tensors: Mapping[str, torch.Tensor],
        names: Mapping[str, str],
        training: bool,
        declared: Declared,
    ) -> None:
        self._normal = normal
        self._signature = signature
        self._training = training
        self._declared = declared
        self._flow: DataFlow | None = None
        self._runs: dict[int, FakeRun] = {}
        self._recipes: dict[object, Recipe] = {}
        self.state = {
            name: TensorShape(
                tuple(tensor.shape),
                tuple(tensor.stride()),
                tensor.dtype,
                isinstance(tensor, nn.Parameter) and tensor.requires_grad,
            )
            for name, tensor in tensors.items()
        }
        for node in normal.graph.nodes:
            if node.op == "call_module":
                prefix = f"{MODEL_PREFIX}{node.target}."
                inside = [known for alias, known in names.items() if alias.startswith(prefix)]
                node.meta["parameters"] = tuple(dict.fromkeys(inside))
            elif node.op == "get_attr" and str(node.target) in normal.modules:
                node.meta["subgraph"] = normal.modules[str(node.target)]

    def prepare(
        self, names: tuple[str, ...], reduction: str | Mapping[str, str] | None
    ) -> list[Term]:
        """Splits the loss and removes what nothing needs; returns the terms."""
        graph, normal = self._normal.graph, self._normal
        self._prune([*normal.losses, *normal.values])
        self._name_returned_parameters()
        small = self._run(2)
        if self._protect_inputs(small) or self._drop_detached(small):
            small = self._run(2)
        flow = self._analyse(small, self._run(3))
        terms = split_loss(graph, normal.losses, names, flow, reduction)
        counts = [term.count for term in terms if term.count is not None]
        self._prune([*(term.node for term in terms), *normal.values, *counts])
        return terms

    def observe(self) -> dict[int, FakeRun]:
        """Fake runs, with the work of every op, by the number of samples."""
        if not self._runs:
            self._runs = {samples: self._run(samples) for samples in SAMPLE_SIZES}
        return self._runs

    def flow(self) -> DataFlow:
        runs = self.observe()
        flow = self._analyse(runs[2], runs[3])
        if self._declared.unused:
            raise CaptureError(
                "per_sample_ops names something that is not in the graph",
                where=", ".join(self._declared.unused),
                expected="names of ops, operators or module paths, as print(graph) shows them",
            )
        return flow

    def _analyse(self, small: FakeRun, large: FakeRun) -> DataFlow:
        rows = {
            node: leaf.rows
            for node, leaf in zip(self._normal.inputs, self._signature.tensors, strict=True)
        }
        return analyse(self._normal.graph, small, large, rows, self._declared)

    def _run(self, samples: int) -> FakeRun:
        inputs = {}
        for node, leaf in zip(self._normal.inputs, self._signature.tensors, strict=True):
            assert isinstance(leaf.value, torch.Tensor)
            shape = list(leaf.value.shape)
            if leaf.rows:
                shape[0] = leaf.rows * samples
            inputs[node.name] = TensorShape(tuple(shape), _strides(shape), leaf.value.dtype)
        return fake_run(
            self._normal.graph,
            samples,
            self.state,
            inputs,
            gradients=self._training,
            cache=self._recipes,
        )

    def _prune(self, roots: Iterable[fx.Node]) -> None:
        """Removes nodes that neither the roots nor a side effect needs."""
        live: set[fx.Node] = {self._normal.batch, *self._normal.inputs}
        stack = list(roots)
        stack += [node for node in self._normal.graph.nodes if _has_effect(node)]
        while stack:
            node = stack.pop()
            if node not in live:
                live.add(node)
                stack.extend(node.all_input_nodes)
        for node in reversed(list(self._normal.graph.nodes)):
            if node not in live:
                self._normal.graph.erase_node(node)

    def _protect_inputs(self, run: FakeRun) -> bool:
        """Copies an input that the model writes to, so that the caller's data stay."""
        written = {storage for seen in run.nodes.values() for storage in seen.mutates}
        graph = self._normal.graph
        changed = False
        for node in self._normal.inputs:
            if any(value.storage in written for value in run.nodes[node].values):
                with graph.inserting_after(self._normal.inputs[-1]):
                    copy = graph.call_function(aten.clone.default, (node,))
                for user in list(node.users):
                    if user is not copy:
                        user.replace_input_with(node, copy)
                self._replace_roots(node, copy)
                changed = True
        return changed

    def _name_returned_parameters(self) -> None:
        """Makes an op of a parameter that the model returns: outputs are ops or inputs."""
        values, graph = self._normal.values, self._normal.graph
        for node in {node for node in values if node.op == "get_attr"}:
            with graph.inserting_after(node):
                returned = graph.call_function(aten.alias.default, (node,))
            values[:] = [returned if value is node else value for value in values]

    def _drop_detached(self, run: FakeRun) -> bool:
        """Removes a detach of what needs no gradient (most of those of no_grad regions)."""
        changed = False
        for node in list(self._normal.graph.nodes):
            if node.target is aten.detach.default:
                source = node.args[0]
                if not any(value.requires_grad for value in run.nodes[source].values):
                    node.replace_all_uses_with(source)
                    self._replace_roots(node, source)
                    self._normal.graph.erase_node(node)
                    changed = True
        return changed

    def _replace_roots(self, old: fx.Node, new: fx.Node) -> None:
        normal = self._normal
        normal.values[:] = [new if node is old else node for node in normal.values]
        normal.losses[:] = [new if node is old else node for node in normal.losses]


def _has_effect(node: fx.Node) -> bool:
    target, _, _ = operator_of(node)
    schema = getattr(target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
