"""The rules that a plan must obey, each naming what breaks it.

Without a graph everything is checked that the plan alone can show: devices, sizes, edges,
cycles, memory, schedule, deadlock. With the graph also that the plan belongs to it: ops,
groups, boundary tensors, edges, inputs and reduce groups are those that follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from graphpipe.errors import PlanError
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.checks import check_schedule
from graphpipe.plan.edges import cuts_of, edges_of_cuts, gradient_ops, input_signatures, listed
from graphpipe.plan.in_flight import find_cycle
from graphpipe.plan.memory import peak_memory
from graphpipe.plan.ranges import smallest_micro_batch
from graphpipe.plan.stage import Stage, StageEdge
from graphpipe.plan.stage_costs import parameters_by_rank, reduce_groups

if TYPE_CHECKING:
    from graphpipe.plan.plan import Plan


def validate(plan: Plan, graph: ModelGraph | None = None) -> None:
    """Checks every rule that applies.

    Args:
        plan: The plan.
        graph: The graph that it is for; None to check what the plan alone can show.

    Raises:
        PlanError: for the first rule that is broken; the message says how many more are.
        ScheduleError: likewise, where it is a rule of schedules.
    """
    problems = list(problems_of(plan, graph))
    if not problems:
        return
    first = problems[0]
    if len(problems) > 1:
        more = "; ".join(error.what for error in problems[1:4])
        fix = f"{first.fix}. " if first.fix else ""
        first = type(first)(
            first.what,
            where=first.where,
            expected=first.expected,
            got=first.got,
            fix=f"{fix}Further problems: {more}",
        )
    raise first


def problems_of(plan: Plan, graph: ModelGraph | None = None) -> Iterator[PlanError]:
    """Every broken rule, in the order of the rules.

    A later group of rules is skipped where an earlier one is broken that it builds on.
    """
    found = False
    rule: Callable[[Plan], Iterator[PlanError]]
    for rule in (_devices, _sizes, _edges, _tables):
        for error in rule(plan):
            found = True
            yield error
    if graph is not None:
        for of_graph in (_fingerprint, _ops, _conditions, _derived):
            if of_graph is _derived and found:
                break
            broken = False
            for error in of_graph(plan, graph):
                found = broken = True
                yield error
            if broken:
                break
    if not found:
        for rule in (_schedule, _memory):
            broken = False
            for error in rule(plan):
                broken = True
                yield error
            if broken:
                return


def _devices(plan: Plan) -> Iterator[PlanError]:
    world = plan.world_size
    copy_of: dict[int, tuple[int, str]] = {}
    for stage in plan.stages:
        unknown = [rank for rank in stage.devices if not 0 <= rank < world]
        if unknown:
            yield PlanError(
                "A stage names devices that the cluster does not have",
                where=f"stage {stage.name!r}",
                expected=f"ranks 0 to {world - 1}",
                got=unknown,
                fix="Plan again for this cluster",
            )
        if len(stage.devices) != stage.replicas * plan.copies:
            yield PlanError(
                "A stage needs a device for each replica of each copy",
                where=f"stage {stage.name!r}",
                expected=f"{stage.replicas} x {plan.copies} devices",
                got=f"{len(stage.devices)}: {list(stage.devices)}",
            )
            continue
        for place, rank in enumerate(stage.devices):
            copy, name = copy_of.setdefault(rank, (place // stage.replicas, stage.name))
            if copy != place // stage.replicas:
                yield PlanError(
                    "A device belongs to two copies",
                    where=f"rank {rank}",
                    got=f"copy {copy} by stage {name!r}, copy {place // stage.replicas} "
                    f"by stage {stage.name!r}",
                )


def _sizes(plan: Plan) -> Iterator[PlanError]:
    least = plan.batch_size // plan.copies
    most = -(-plan.batch_size // plan.copies)
    if least < 1:
        yield PlanError(
            "There are more copies than samples",
            expected=f"at most {plan.batch_size} copies",
            got=plan.copies,
        )
    for stage in plan.stages:
        if stage.micro_batch > most:
            yield PlanError(
                "A micro-batch is larger than the samples of a copy",
                where=f"stage {stage.name!r}",
                expected=f"at most {most} samples",
                got=stage.micro_batch,
                fix="Use smaller micro-batches or fewer copies",
            )
    for edge in plan.edges:
        if max(edge.source, edge.target) >= len(plan.stages):
            continue
        sizes = sorted(plan.stages[s].micro_batch for s in (edge.source, edge.target))
        if sizes[1] % sizes[0]:
            source, target = plan.stages[edge.source], plan.stages[edge.target]
            yield PlanError(
                "Micro-batch sizes of neighbouring stages must divide one another",
                where=f"stages {source.name!r} and {target.name!r}",
                got=f"{source.micro_batch} and {target.micro_batch} samples",
            )


def _edges(plan: Plan) -> Iterator[PlanError]:
    count = len(plan.stages)
    pairs: set[tuple[int, int]] = set()
    for number, edge in enumerate(plan.edges):
        if max(edge.source, edge.target) >= count:
            yield PlanError(
                "An edge names a stage that the plan does not have",
                where=f"edge {number}",
                expected=f"stages 0 to {count - 1}",
                got=f"{edge.source} -> {edge.target}",
            )
            continue
        if (edge.source, edge.target) in pairs:
            yield PlanError(
                "Two edges join the same stages",
                where=f"edge {number}, {edge.source} -> {edge.target}",
                expected="one edge with all tensors",
            )
        pairs.add((edge.source, edge.target))
    usable = [e for e in plan.edges if max(e.source, e.target) < count]
    yield from _cycles_of(plan.stages, usable)


def _cycle(stages: Sequence[Stage], edges: Sequence[StageEdge], cycle: Sequence[int]) -> PlanError:
    hops: list[str] = []
    for source, target in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        edge = next(e for e in edges if (e.source, e.target) == (source, target))
        hops.append(
            f"{stages[source].name!r} -> {stages[target].name!r} by {edge.tensors[0].name!r}"
        )
    return PlanError(
        "The stages form a cycle",
        where="; ".join(hops),
        expected="convex stages: no path that leaves a stage may come back to it",
        fix="Merge the stages on the cycle, or move ops between them",
    )


def _tables(plan: Plan) -> Iterator[PlanError]:
    world = plan.world_size
    for field in ("optimizer_ns", "static_memory"):
        values: tuple[int, ...] = getattr(plan, field)
        if values and len(values) != world:
            yield PlanError(
                "A table by rank has the wrong length",
                where=f"field '{field}'",
                expected=f"{world} entries",
                got=len(values),
            )
    seen: dict[str, int] = {}
    for number, group in enumerate(plan.reduce_groups):
        unknown = [rank for rank in group.ranks if not 0 <= rank < world]
        if unknown or len(set(group.ranks)) < len(group.ranks):
            yield PlanError(
                "A reduce group needs distinct ranks of the cluster",
                where=f"reduce group {number}",
                expected=f"ranks 0 to {world - 1}",
                got=list(group.ranks),
            )
        for name in group.parameters:
            if seen.setdefault(name, number) != number:
                yield PlanError(
                    "A parameter is in two reduce groups",
                    where=f"parameter {name!r}",
                    got=f"groups {seen[name]} and {number}",
                )


def _schedule(plan: Plan) -> Iterator[PlanError]:
    try:
        check_schedule(plan)
    except PlanError as error:
        yield error


def _memory(plan: Plan) -> Iterator[PlanError]:
    peaks = peak_memory(plan)
    for rank, (peak, device) in enumerate(zip(peaks, plan.cluster.devices, strict=True)):
        if peak > device.memory_bytes:
            names = ", ".join(repr(plan.stages[s].name) for s in plan.stages_of_device[rank])
            yield PlanError(
                "The plan needs more memory than a device has",
                where=f"rank {rank} ({device.kind}) with stage {names}",
                expected=f"at most {device.memory_bytes} bytes",
                got=f"{peak} bytes, of which {plan.static_bytes(rank)} for parameters, "
                "gradients and optimizer state",
                fix="Use smaller micro-batches, recompute in these stages, or spread them over "
                "more devices",
            )


def _fingerprint(plan: Plan, graph: ModelGraph) -> Iterator[PlanError]:
    if plan.fingerprint and plan.fingerprint != graph.fingerprint:
        yield PlanError(
            "The plan was made for another graph",
            where=f"plan for {plan.model!r}, graph {graph.name!r}",
            expected=f"fingerprint {graph.fingerprint}",
            got=plan.fingerprint,
            fix="Plan again: the model, its shapes or its mode have changed",
        )


def _ops(plan: Plan, graph: ModelGraph) -> Iterator[PlanError]:
    try:
        cuts = cuts_of(graph, plan.stages)
    except PlanError as error:
        yield error
        return
    for stage, cut in zip(plan.stages, cuts, strict=True):
        if stage.ops != cut.ops:
            yield PlanError(
                "A stage must list its ops in the graph's order, without prep ops",
                where=f"stage {stage.name!r}",
                expected=listed([repr(name) for name in cut.ops]),
                got=listed([repr(name) for name in stage.ops]),
            )
    owner = {name: s for s, stage in enumerate(plan.stages) for name in stage.ops}
    groups: dict[int, dict[int, str]] = {}
    for op in graph.ops:
        if op.group is not None and not op.prep:
            groups.setdefault(op.group, {}).setdefault(owner[op.name], op.name)
    for members in groups.values():
        if len(members) > 1:
            places = [f"{name!r} in {plan.stages[s].name!r}" for s, name in members.items()]
            yield PlanError(
                "Ops that must stay together are in different stages",
                where=listed(places),
                expected="one stage for all: they share memory that one of them changes, or "
                "parts of one result",
                fix="Move them into one stage",
            )
    for target, cut in zip(plan.stages, cuts, strict=True):
        for name in cut.reads:
            if not graph.op_by_name[name].crossable:
                yield PlanError(
                    "A value may not pass from one stage to another",
                    where=f"op {name!r} (module {graph.op_by_name[name].module or '-'}), "
                    f"read by stage {target.name!r}",
                    expected="a tensor whose first dimension is a multiple of the batch, sample "
                    "by sample, or that has no batch dimension",
                    fix=f"Keep {name!r} and its readers in one stage",
                )
    # The plan's own edges may be wrong: a cycle must show in the true ones.
    true_edges = edges_of_cuts(graph, cuts)
    if not any(True for _ in _edges(plan)):
        yield from _cycles_of(plan.stages, true_edges)


def _conditions(plan: Plan, graph: ModelGraph) -> Iterator[PlanError]:
    """Micro-batches that an op does not accept; the short last one counts."""
    for stage in plan.stages:
        smallest = smallest_micro_batch(stage.micro_batch, plan.copies, plan.batch_size)
        for condition in graph.broken_conditions(stage.ops, smallest):
            yield PlanError(
                f"An op does not accept a micro-batch of this size: {condition.message}",
                where=f"stage {stage.name!r}, op {condition.op!r}",
                expected=f"at least {condition.min_samples} samples in every micro-batch",
                got=smallest,
                fix="Use a larger micro-batch for this stage, one that leaves no short rest",
            )


def _cycles_of(stages: Sequence[Stage], edges: Sequence[StageEdge]) -> Iterator[PlanError]:
    consumers: list[list[int]] = [[] for _ in stages]
    for edge in edges:
        consumers[edge.source].append(edge.target)
    remaining = set(range(len(stages)))
    while ends := {s for s in remaining if not any(c in remaining for c in consumers[s])}:
        remaining -= ends
    if remaining:
        yield _cycle(stages, edges, find_cycle(consumers, remaining))


def _derived(plan: Plan, graph: ModelGraph) -> Iterator[PlanError]:
    """Edges, inputs, backward and reduce groups are those that follow from the graph."""
    cuts = cuts_of(graph, plan.stages)
    with_gradient = gradient_ops(graph)
    for stage, cut in zip(plan.stages, cuts, strict=True):
        backward = any(name in with_gradient for name in cut.ops)
        if stage.has_backward != backward:
            yield _differs("whether it has a backward", f"stage {stage.name!r}",
                           backward, stage.has_backward)  # fmt: skip
    true_edges = {(e.source, e.target): e for e in edges_of_cuts(graph, cuts)}
    own_edges = {(e.source, e.target): e for e in plan.edges}
    for pair in sorted(true_edges.keys() | own_edges.keys()):
        want = _tensors(true_edges.get(pair))
        got = _tensors(own_edges.get(pair))
        if want != got:
            first = next(
                (name for name in sorted(want.keys() | got.keys())
                 if want.get(name) != got.get(name)),
            )  # fmt: skip
            yield _differs(
                f"tensor {first!r}",
                f"edge {pair[0]} -> {pair[1]}",
                want.get(first, "no such tensor"),
                got.get(first, "no such tensor"),
            )
    for true_input, own_input in zip(input_signatures(graph, cuts), plan.inputs, strict=False):
        if true_input != own_input:
            yield _differs("signature", f"input {true_input.name!r}", true_input, own_input)
    if len(plan.inputs) != len(graph.inputs):
        yield _differs("number of inputs", "field 'inputs'", len(graph.inputs), len(plan.inputs))
    held = parameters_by_rank(cuts, [stage.devices for stage in plan.stages], plan.world_size)
    trained = frozenset(
        name
        for stage, cut in zip(plan.stages, cuts, strict=True)
        if stage.has_backward
        for name in cut.parameters
    )
    want_groups = {
        name: group.ranks
        for group in reduce_groups(graph, held, trained)
        for name in group.parameters
    }
    got_groups = {
        name: tuple(sorted(group.ranks))
        for group in plan.reduce_groups
        for name in group.parameters
    }
    for name in sorted(want_groups.keys() | got_groups.keys()):
        if want_groups.get(name) != got_groups.get(name):
            yield _differs(
                "ranks that sum its gradient",
                f"parameter {name!r}",
                want_groups.get(name, "none"),
                got_groups.get(name, "none"),
            )


def _tensors(edge: StageEdge | None) -> dict[str, str]:
    """What must agree about each tensor of an edge; bytes are predictions and may differ."""
    if edge is None:
        return {}
    return {
        t.name: f"{t.dtype} {list(t.shape)}, "
        + (f"{t.rows_per_sample} rows a sample" if t.rows_per_sample else "no batch dimension")
        + (", with gradient" if t.has_gradient else ", without gradient")
        for t in edge.tensors
    }


def _differs(what: str, where: str, expected: object, got: object) -> PlanError:
    return PlanError(
        f"The plan does not agree with its graph on {what}",
        where=where,
        expected=expected,
        got=got,
        fix="Plan again, or make the plan with graphpipe.plan.assemble",
    )


def coupled_notes(graph: ModelGraph, stages: Sequence[Stage], batch_size: int) -> tuple[str, ...]:
    """One warning where ops that mix samples see less than the whole mini-batch, else none."""
    found: list[str] = []
    for stage in stages:
        whole = stage.micro_batch >= batch_size and len(stage.devices) == 1
        coupled = [name for name in stage.ops if graph.op_by_name[name].coupled]
        if coupled and not whole:
            what = graph.op_by_name[coupled[0]]
            more = f" and {len(coupled) - 1} more" if len(coupled) > 1 else ""
            found.append(
                f"{what.module or what.name} ({what.target}){more} in stage {stage.name!r}, "
                f"micro-batches of {stage.micro_batch}"
            )
    if not found:
        return ()
    return (
        "These ops mix the samples of a batch and see one micro-batch at a time, so the result "
        f"follows the micro-batch size: {listed(found, 3)}. For the result of the whole "
        f"mini-batch give their stage micro_batch = {batch_size} and one replica.",
    )
