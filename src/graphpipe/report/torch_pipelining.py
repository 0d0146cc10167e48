"""Hands a chain plan over to ``torch.distributed.pipelining``.

Each rank gets its stages as ``PipelineStage`` objects, which any of torch's schedules can run:
one of its own, or the plan's (:func:`~graphpipe.report.torch_schedule.torch_schedule_csv`).
Stage modules take what they read of the model's inputs as keywords, so that labels and masks
reach whichever stage needs them, and the last one returns the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

from graphpipe.errors import PlanError, RuntimeSetupError
from graphpipe.graph.cut import stage_cut
from graphpipe.graph.model_graph import LossTerm, ModelGraph
from graphpipe.graph.program import Program
from graphpipe.graph.signature import bind_inputs
from graphpipe.plan.plan import Plan
from graphpipe.report.torch_schedule import chain_order
from graphpipe.runtime.losses import ancestors, term_weight
from graphpipe.runtime.stage_module import build_stage_module, state_names

_REDUCTIONS = ("mean", "sum", "batch_free", "sum_count")


class TorchChain:
    """A chain plan's part on one rank, in the form of torch's pipelines.

    Attributes:
        stages: This rank's stages, to be given to a schedule.
        modules: Their modules; parameters have the model's own names and are the model's own.
        micro_batches: Number of micro-batches of a mini-batch.

    Args:
        graph: The graph that was planned, as ``capture`` returned it.
        plan: A chain plan.
        rank: This process among the ranks that host a stage, ascending.
        device: Where the stages run.
        group: Process group of these ranks; the default group if not given.

    Raises:
        PlanError: if torch's pipelines cannot run the plan.
        RuntimeSetupError: if the graph was read from a file and cannot be run.
    """

    def __init__(
        self,
        graph: ModelGraph,
        plan: Plan,
        rank: int,
        *,
        device: torch.device | str = "cpu",
        group: ProcessGroup | None = None,
    ) -> None:
        if graph.program is None:
            raise RuntimeSetupError(
                "The graph has no program, so it cannot be run",
                where=graph.name,
                expected="a graph that graphpipe.capture made in this process",
                fix="Capture the model again; the plan stays valid",
            )
        self._graph = graph
        self._program: Program = graph.program
        self._order = chain_order(plan)
        self._terms = tuple(dict.fromkeys(term.op for term in graph.loss_terms))
        size = plan.stages[0].micro_batch
        self.micro_batches = plan.batch_size // size
        last = self._order[-1]
        _check(graph, plan, last)
        hosts = sorted({plan.stages[stage].devices[0] for stage in self._order})
        mine = [s for s in self._order if plan.stages[s].devices[0] == hosts[rank]]
        self.modules = [
            _ChainStage(
                self._module(plan, stage, device), size, self._terms if stage == last else ()
            )
            for stage in mine
        ]
        self._plan, self._device = plan, device
        self._keywords = {
            name for stage in mine for name in stage_cut(graph, plan.stages[stage].ops).inputs
        }
        self._last = self.modules[-1] if last in mine else None
        self.stages = [
            PipelineStage(
                module,
                self._order.index(stage),
                len(self._order),
                torch.device(device),
                group=group,
            )
            for stage, module in zip(mine, self.modules, strict=True)
        ]

    @staticmethod
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """What to give to the schedule as its loss: the last stage has computed it."""
        return output

    def step(
        self,
        schedule: Any,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        targets: object = None,
    ) -> torch.Tensor | None:
        """Runs one mini-batch, inputs as for the model; gradients are left in the parameters.

        Args:
            schedule: One of torch's, made of ``stages``, ``micro_batches`` and ``loss_fn``.
            args: Positional inputs: the whole mini-batch, on every rank.
            kwargs: Keyword inputs.
            targets: Second argument of the loss.

        Returns:
            The loss of the mini-batch on the rank of the last stage, None on the others.

        Raises:
            InputError: if the inputs are not those of the capture.
        """
        values, _ = bind_inputs(self._graph, self._program, args, kwargs, targets)
        own = {name: values[name] for name in values if name in self._keywords}
        if self._last is None:
            schedule.step(return_outputs=False, **own)
            return None
        self._last.weights = [
            (self._terms.index(term.op), self._weight(term, values))
            for term in self._graph.loss_terms
        ]
        losses: list[torch.Tensor] = []
        # torch cuts a target for every micro-batch and calls the loss with it: there is none.
        target = torch.zeros(self.micro_batches)
        schedule.step(target=target, losses=losses, return_outputs=False, **own)
        return torch.stack([loss.detach() for loss in losses]).mean()

    def _module(self, plan: Plan, stage: int, device: torch.device | str) -> fx.GraphModule:
        cut = stage_cut(self._graph, plan.stages[stage].ops)
        return self._build(
            cut.ops, cut.prep, (*cut.reads, *cut.inputs), cut.writes or self._terms, device
        )

    def _build(
        self,
        ops: Sequence[str],
        prep: Sequence[str],
        inputs: Sequence[str],
        outputs: Sequence[str],
        device: torch.device | str,
    ) -> fx.GraphModule:
        program = self._program
        state = {name: program.state[name] for name in state_names(program, ops, prep)}
        return build_stage_module(
            program,
            ops=ops,
            prep=prep,
            inputs=inputs,
            outputs=outputs,
            state={
                name: value if isinstance(value, nn.Parameter) else value.to(device)
                for name, value in state.items()
            },
            device=device,
        )

    def _weight(self, term: LossTerm, values: Mapping[str, torch.Tensor]) -> float:
        """What one micro-batch's value of a loss term counts for.

        torch divides gradients by the number of micro-batches, so they are multiplied by it.
        """
        count = None
        if term.count_op is not None:
            ops = ancestors(self._graph, [term.count_op])
            read = {name for op in ops for name in self._graph.op_by_name[op].inputs}
            inputs = [name for name in values if name in read]
            module = self._build(ops, (), inputs, [term.count_op], self._device)
            with torch.no_grad():
                (found,) = module(self._plan.batch_size, *(values[name] for name in inputs))
            count = float(found)
        constant, slope = term_weight(term, self._plan.batch_size, count)
        size = self._plan.batch_size // self.micro_batches
        return (constant + slope * size) * self.micro_batches


class _ChainStage(nn.Module):
    """A stage module with the calling convention of ``PipelineStage``.

    ``weights`` are (number of the output, weight) of the loss terms; they are set before a step.
    """

    def __init__(self, stage: fx.GraphModule, micro_batch: int, terms: Sequence[str]) -> None:
        super().__init__()
        self.stage = stage
        self.micro_batch = micro_batch
        self.weights = [(number, 1.0) for number in range(len(terms))]
        self.names = [node.name for node in stage.graph.nodes if node.op == "placeholder"][1:]

    def forward(self, *received: torch.Tensor, **inputs: torch.Tensor) -> Any:
        given = [inputs[name] for name in self.names[len(received) :]]
        outputs = self.stage(self.micro_batch, *received, *given)
        if self.weights:
            return torch.stack(
                [outputs[i].reshape(()) * weight for i, weight in self.weights]
            ).sum()
        return outputs if len(outputs) > 1 else outputs[0]


def _check(graph: ModelGraph, plan: Plan, last: int) -> None:
    """Refuses what the stages of a chain would not see or torch would not send."""
    if plan.split_joins:
        raise PlanError(
            "torch.distributed.pipelining cannot run this plan: it would take the slices of a "
            "weight for parameters of their own",
            where=f"split join of {plan.split_joins[0].parameter}",
            fix="Plan without split_joins, or run the plan with graphpipe.Pipeline",
        )
    for term in graph.loss_terms:
        late = term.count_op is not None and not term.count_from_inputs
        if term.op not in plan.stages[last].ops or term.reduction not in _REDUCTIONS or late:
            raise PlanError(
                "torch.distributed.pipelining cannot run this plan: it takes one loss from the "
                "last stage, whose parts add up over micro-batches",
                where=f"loss term {term.op} ({term.reduction})",
                expected=f"a term in stage {last}, of reduction {', '.join(_REDUCTIONS)}, and a "
                "count that the inputs decide",
                fix="Run the plan with graphpipe.Pipeline",
            )
    for edge in plan.edges:
        for tensor in edge.tensors:
            if not tensor.has_gradient:
                raise PlanError(
                    "torch.distributed.pipelining cannot run this plan: it sends a gradient for "
                    "every tensor between stages",
                    where=f"tensor {tensor.name} from stage {edge.source} to {edge.target}",
                    expected="a tensor that needs a gradient",
                    fix="Run the plan with graphpipe.Pipeline",
                )
    for item in graph.inputs:
        if not item.per_sample:
            raise PlanError(
                "torch.distributed.pipelining cannot run this plan: it cuts every input along "
                "dimension 0",
                where=f"input {item.path}",
                expected="a per-sample input",
                fix="Run the plan with graphpipe.Pipeline",
            )
