"""A captured graph laid onto the plan's partition.

A plan is made for one graph: one mode and one input signature. Other variants of the model
(evaluation, another sequence length, a modality that is missing) are captured when they are
needed and mapped onto the same partition by the stable keys of their ops. A variant has a
plan of its own, with its own edges and schedules, that keeps the stages, devices and
micro-batch sizes of the first.
"""

from __future__ import annotations

from typing import Literal

import torch

from graphpipe.errors import InputError, RuntimeSetupError
from graphpipe.graph.cut import StageCut, partition_ops, stage_cut
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.graph.program import Program
from graphpipe.plan.actions import ActionLists, Ordering, build_actions
from graphpipe.plan.edges import gradient_ops, stage_edges
from graphpipe.plan.plan import Plan
from graphpipe.plan.ranges import SampleRange, copy_range, smallest_micro_batch
from graphpipe.plan.schedule import Schedule
from graphpipe.runtime.losses import ancestors, counted_terms
from graphpipe.runtime.rank_compiler import Compiler
from graphpipe.runtime.rank_program import (
    GraphInterface,
    RankProgram,
    StageInterface,
    dtype_of,
)

Purpose = Literal["train", "loss", "predict"]
"""``train``: forwards and backwards; ``loss``: forwards up to the loss terms; ``predict``:
forwards up to the model's outputs."""


class Variant:
    """One graph on the partition, for one purpose.

    Args:
        graph: A captured graph with its program.
        plan: The plan whose stages hold ops of ``graph`` (see :func:`map_plan`).
        purpose: What is run.
        origin: By stage of ``plan``, the stage of the first plan that it is.
        ordering: Of messages: see :func:`graphpipe.plan.actions.build_actions`.

    Raises:
        RuntimeSetupError: if the graph was read from a file and has no program.
    """

    def __init__(
        self,
        graph: ModelGraph,
        plan: Plan,
        purpose: Purpose,
        origin: tuple[int, ...],
        ordering: Ordering = "channel",
    ) -> None:
        if graph.program is None:
            raise RuntimeSetupError(
                "The graph has no program, so it cannot be run",
                where=graph.name,
                expected="a graph that graphpipe.capture made in this process",
                fix="Capture the model again; the plan stays valid",
            )
        self.graph = graph
        self.plan = plan
        self.purpose = purpose
        self.origin = origin
        self.ordering: Ordering = ordering
        self.program: Program = graph.program
        self.cuts: tuple[StageCut, ...] = tuple(
            stage_cut(graph, stage.ops) for stage in plan.stages
        )
        wanted = self._wanted()
        self.interfaces: tuple[StageInterface, ...] = tuple(
            StageInterface(
                (*cut.inputs, *cut.reads),
                (*cut.writes, *(name for name in cut.ops if name in wanted - set(cut.writes))),
            )
            for cut in self.cuts
        )
        self.leaf_numbers = {item.name: i for i, item in enumerate(graph.inputs)}
        self._interface = GraphInterface(
            leaves={
                item.name: (i, (item.spec.rows_per_sample or 1) if item.per_sample else None)
                for i, item in enumerate(graph.inputs)
            },
            terms=self._numbers([term.op for term in graph.loss_terms])
            if purpose != "predict"
            else {},
            counts=self._late_counts() if purpose != "predict" else {},
            results=self._numbers(graph.outputs) if purpose == "predict" else {},
        )
        self._checked: set[int] = set()
        self._actions: dict[int, ActionLists] = {}
        self._programs: dict[tuple[int, int], RankProgram] = {}

    @property
    def training(self) -> bool:
        """Whether backwards run."""
        return self.purpose == "train"

    @property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of the loss: that of its first term."""
        for term in self.graph.loss_terms:
            spec = self.graph.op_by_name[term.op].output
            if spec is not None:
                return dtype_of(spec.dtype)
        return torch.float32

    @staticmethod
    def _numbers(names: tuple[str, ...] | list[str]) -> dict[str, tuple[int, ...]]:
        out: dict[str, tuple[int, ...]] = {}
        for number, name in enumerate(names):
            out[name] = (*out.get(name, ()), number)
        return out

    def _wanted(self) -> set[str]:
        """Ops whose values the runtime itself takes from a stage."""
        if self.purpose == "predict":
            return set(self.graph.outputs)
        return {term.op for term in self.graph.loss_terms} | set(self._late_counts().values())

    def _late_counts(self) -> dict[int, str]:
        """By term, the count op of those whose count only the forward gives."""
        return {
            i: term.count_op
            for i, term in enumerate(self.graph.loss_terms)
            if term.count_op is not None and not term.count_from_inputs
        }

    def check_batch(self, batch_size: int) -> None:
        """Refuses a mini-batch that an op does not accept, or whose loss cannot be exact.

        Raises:
            InputError: if the short last micro-batch of a stage is too small for an op.
            RuntimeSetupError: naming the stage whose term is divided by a count that is only
                known after the forwards of the whole mini-batch.
        """
        if batch_size in self._checked:
            return
        for number, stage in enumerate(self.plan.stages):
            smallest = smallest_micro_batch(stage.micro_batch, self.plan.copies, batch_size)
            for condition in self.graph.broken_conditions(stage.ops, smallest):
                raise InputError(
                    f"The last micro-batch is too small for an op: {condition.message}",
                    where=f"stage {number} ({stage.name}), op {condition.op}, mini-batch of "
                    f"{batch_size} samples in micro-batches of {stage.micro_batch}",
                    expected=f"at least {condition.min_samples} samples in every micro-batch",
                    got=smallest,
                    fix="Leave this mini-batch out (drop_last), or fill it up",
                )
        for term, count in self._late_counts().items():
            number = self.term_stage(term)
            stage = self.plan.stages[number]
            whole = stage.micro_batch >= batch_size and len(stage.devices) == 1
            if count not in stage.ops or not whole:
                raise RuntimeSetupError(
                    "A loss term is divided by a count that depends on activations, so it needs "
                    "the whole mini-batch at once",
                    where=f"stage {number} ({stage.name}), op {self.graph.loss_terms[term].op}",
                    expected=f"a micro-batch of {batch_size} samples on one device, and the count "
                    f"{count} in the same stage",
                    got=f"micro-batches of {stage.micro_batch} on {len(stage.devices)} devices",
                    fix="Plan with that stage's micro-batch fixed to the batch size",
                )
        self._checked.add(batch_size)

    def needed_ops(self, stage: int) -> list[str]:
        """The ops that a stage runs: all but counts of loss terms that were taken before."""
        early = {
            term.count_op for term in self.graph.loss_terms if term.count_from_inputs
        } - self._wanted()
        index, successors = self.graph.op_index, self.graph.successors
        return [
            name for name in self.cuts[stage].ops if name not in early or successors[index[name]]
        ]

    def copy_of(self, rank: int) -> int | None:
        """The copy that a rank belongs to; None for an idle rank."""
        for stage in self.plan.stages:
            if rank in stage.devices:
                return stage.devices.index(rank) // stage.replicas
        return None

    def hosted(self, rank: int) -> tuple[int, ...]:
        """The stages of this variant's plan that a rank hosts."""
        return self.plan.stages_of_device[rank]

    def needs(self, rank: int) -> tuple[str, ...]:
        """Names of the graph inputs that a rank reads."""
        names = {name for stage in self.hosted(rank) for name in self.cuts[stage].inputs}
        names.update(self.count_inputs(rank))
        return tuple(item.name for item in self.graph.inputs if item.name in names)

    def term_stage(self, term: int) -> int:
        """The stage that computes a loss term."""
        name = self.graph.loss_terms[term].op
        for number, stage in enumerate(self.plan.stages):
            if name in stage.ops:
                return number
        raise RuntimeSetupError(f"No stage computes the loss term {name!r}")

    def count_ops(self, stage: int) -> list[tuple[int, str]]:
        """(term, count op) of the terms of a stage that divide by a count of the inputs."""
        if self.purpose == "predict":
            return []
        out: list[tuple[int, str]] = []
        for term in counted_terms(self.graph):
            name = self.graph.loss_terms[term].count_op
            if name is not None and self.term_stage(term) == stage:
                out.append((term, name))
        return out

    def count_inputs(self, rank: int) -> set[str]:
        """Graph inputs that the counts of a rank's loss terms need."""
        names: set[str] = set()
        for stage in self.hosted(rank):
            ops = [name for _, name in self.count_ops(stage)]
            for name in ancestors(self.graph, ops):
                read = self.graph.op_by_name[name].inputs
                names.update(item for item in read if item in self.graph.input_by_name)
        return names

    def rank_program(self, rank: int, batch_size: int) -> RankProgram:
        """The compiled iteration of a rank for a mini-batch of so many samples (cached)."""
        key = (rank, batch_size)
        if key not in self._programs:
            self._programs[key] = self._compile(rank, batch_size)
        return self._programs[key]

    def actions(self, batch_size: int) -> ActionLists:
        """The action lists of all ranks for a mini-batch of so many samples (cached)."""
        if batch_size not in self._actions:
            self._actions[batch_size] = build_actions(
                self.plan, batch_size, training=self.training, ordering=self.ordering
            )
        return self._actions[batch_size]

    def _compile(self, rank: int, batch_size: int) -> RankProgram:
        copy = self.copy_of(rank)
        if copy is None:
            return RankProgram(rank, SampleRange(0, 0), 0, (), (), 0)
        found = self.actions(batch_size)
        compiler = Compiler(
            rank,
            self.plan.stages,
            self.plan.edges,
            {stage: self.interfaces[stage] for stage in self.hosted(rank)},
            self._interface,
            copy_range(copy, self.plan.copies, batch_size),
            copy,
            training=self.training,
        )
        return compiler.compile(found.lines[rank], found.messages)


def map_plan(plan: Plan, graph: ModelGraph, variant: ModelGraph) -> tuple[Plan, tuple[int, ...]]:
    """The plan of another variant of the model, and which stage of ``plan`` each of its is.

    Args:
        plan: The plan of ``graph``.
        graph: The graph that was planned.
        variant: Another capture of the same model.

    Raises:
        RuntimeSetupError: naming an op of the variant that the plan has no stage for.
    """
    stage_of_key: dict[str, int] = {}
    for number, stage in enumerate(plan.stages):
        for name in stage.ops:
            stage_of_key[graph.op_by_name[name].key] = number
    ops: list[list[str]] = [[] for _ in plan.stages]
    for name in partition_ops(variant):
        op = variant.op_by_name[name]
        found = stage_of_key.get(op.key)
        if found is None:
            raise RuntimeSetupError(
                "This variant of the model has an op that the planned one does not have",
                where=f"{op.module or 'the model'}, {op.source or op.target}",
                expected="the same ops in every mode and for every input",
                got=op.key,
                fix="Plan with the variant that has the most ops, or plan again for this one",
            )
        ops[found].append(name)
    origin = tuple(number for number, names in enumerate(ops) if names)
    differentiable = gradient_ops(variant)
    stages = tuple(
        plan.stages[number].model_copy(
            update={
                "ops": tuple(ops[number]),
                "has_backward": any(name in differentiable for name in ops[number]),
            }
        )
        for number in origin
    )
    # Made anew, not copied: a copy would keep the cached properties of the first plan.
    fields = {name: getattr(plan, name) for name in Plan.model_fields}
    fields |= {
        "stages": stages,
        "edges": stage_edges(variant, stages),
        "fingerprint": variant.fingerprint,
        "schedule": Schedule(lines=(), builder=plan.schedule.builder),
        "prediction": None,
    }
    return Plan(**fields), origin
