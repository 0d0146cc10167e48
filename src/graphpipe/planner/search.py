"""``plan``: a graph, its costs and a cluster in, the best plan found out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from graphpipe.cost.cluster import Cluster
from graphpipe.cost.table import CostTable
from graphpipe.errors import CostError, PlanError
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.planner.collector import no_collection
from graphpipe.planner.constraints import Constraints, Resolved, resolve
from graphpipe.planner.explore import Progress
from graphpipe.planner.fitting import Outcome, fitting_plan
from graphpipe.planner.infeasible import check_sizes, no_plan
from graphpipe.planner.patience import Patience
from graphpipe.planner.seeds import Freedom
from graphpipe.planner.shared_search import better
from graphpipe.planner.space import Space
from graphpipe.planner.splitting import better_of_both
from graphpipe.planner.unit_graph import UnitGraph, build_units
from graphpipe.planner.whole import whole_batch_ops

DEFAULT_BUDGET = 800
"""Candidates that a search judges unless told otherwise."""

_LEAST_USED = 0.8

_SHARED_SHARE = 2
"""Of the budget, what the search among shared devices may spend."""


def plan(
    graph: ModelGraph,
    costs: CostTable,
    cluster: Cluster,
    *,
    batch_size: int,
    memory_limit: float | None = None,
    micro_batches: Sequence[int] | None = None,
    copies: int | Sequence[int] | None = None,
    replicas: Sequence[int] | bool = True,
    recompute: bool | Literal["auto"] = "auto",
    coupled: Literal["mini_batch", "micro_batch"] = "mini_batch",
    constraints: Constraints | None = None,
    stages: int | None = None,
    families: Sequence[str] = ("graph", "chain", "shared"),
    budget: int = DEFAULT_BUDGET,
    time_limit: float | None = None,
    progress: Progress | None = None,
    parts: int = 128,
    split_joins: bool | CostTable = False,
) -> Plan:
    """Searches for the plan with the shortest simulated iteration.

    The same input gives the same plan, unless ``time_limit`` or an interrupt (Ctrl-C) cuts the
    search short: then the best plan so far is returned, and says so in its notes. An interrupt
    before there is any plan is let through.

    Args:
        graph: The model and its loss.
        costs: Its costs, for every kind of device in the cluster.
        cluster: The devices. Not all need to be used; idle ones are named in the plan.
        batch_size: B, samples of a mini-batch.
        memory_limit: Bytes of each device that a plan may use, if less than it has.
        micro_batches: r_s b_s to try, samples; by default sizes that divide the mini-batch.
        copies: Values of R to try; by default all that make sense.
        replicas: Sizes of replicated stages to try; False for none.
        recompute: ``auto``: where memory asks for it; True: in every stage; False: nowhere.
        coupled: What to do with a loss that mixes the samples of a mini-batch: run it on the
            whole ``mini_batch`` (exact), or let it follow the ``micro_batch``.
        constraints: Further demands.
        stages: Exactly so many parts, one device each (with ``replicas=False``).
        families: ``graph``, ``chain`` and ``sequential``, see
            :class:`~graphpipe.planner.seeds.Freedom`, and ``shared``: stages with layouts of
            their own on the same devices, see ``graphpipe.planner.shared_search``.
        budget: The most candidates to judge.
        time_limit: Seconds after which the best so far is returned.
        progress: Called now and then with (candidates judged, seconds of the best iteration).
        parts: Grain of the units that are moved: none has more than 1/parts of the work.
        split_joins: Also plan for the graph with its joins split
            (:func:`~graphpipe.graph.split_joins.split_joins`), and take the better plan. True
            where ``costs`` are estimated; else the costs of the rewritten graph.

    Raises:
        InfeasibleError: where no plan fits, naming what is too large and what would help.
        PlanError: for options that contradict each other or the input.
        CostError: if the costs belong to another graph or lack a kind of device.
    """
    if split_joins:
        return better_of_both(
            graph,
            costs,
            split_joins if isinstance(split_joins, CostTable) else None,
            lambda rewritten, table: plan(
                rewritten, table, cluster, batch_size=batch_size, memory_limit=memory_limit,
                micro_batches=micro_batches, copies=copies, replicas=replicas,
                recompute=recompute, coupled=coupled, constraints=constraints, stages=stages,
                families=families, budget=budget, time_limit=time_limit, progress=progress,
                parts=parts,
            ),
        )  # fmt: skip
    space = make_space(
        graph,
        costs,
        cluster,
        batch_size=batch_size,
        memory_limit=memory_limit,
        coupled=coupled,
        constraints=constraints,
        parts=parts,
    )
    freedom = _freedom(
        space, micro_batches, copies, replicas, recompute, families, stages, cluster.world_size
    )
    patience = Patience(time_limit)
    with no_collection():
        outcome = Outcome(None)
        if freedom.families:
            outcome = fitting_plan(
                space, freedom, budget=budget, patience=patience, progress=progress
            )
        best = outcome.plan
        if "shared" in families and not patience.interrupted:
            room, space.margin = space.margin, 0.0
            with patience.guarded(lambda: best is not None):
                other = better(
                    space, freedom, best, budget=_SHARED_SHARE * budget, stop=patience.stop
                )
                best = other if other is not None else best
            space.margin = room
        if best is None:
            raise no_plan(space, freedom, outcome)
        if patience.interrupted and not any("interrupted" in note for note in best.notes):
            notes = (*best.notes, "The search was interrupted: the best so far.")
            best = best.model_copy(update={"notes": notes})
        return best


def make_space(
    graph: ModelGraph,
    costs: CostTable,
    cluster: Cluster,
    *,
    batch_size: int,
    memory_limit: float | None = None,
    coupled: Literal["mini_batch", "micro_batch"] = "mini_batch",
    constraints: Constraints | None = None,
    parts: int = 128,
) -> Space:
    """Checks the input and coarsens the graph; see :func:`plan` for the arguments."""
    if batch_size < 1:
        raise PlanError("A mini-batch has at least one sample", where="batch_size", got=batch_size)
    if memory_limit is not None and memory_limit <= 0:
        raise PlanError("The memory limit is not positive", where="memory_limit", got=memory_limit)
    if costs.fingerprint != graph.fingerprint:
        raise CostError(
            "The costs belong to another graph",
            where=f"graph {graph.name!r}",
            expected=graph.fingerprint,
            got=costs.fingerprint,
            fix="Estimate or profile this graph again",
        )
    for kind in cluster.kinds:
        costs.device_costs(kind)
    demands = constraints if constraints is not None else Constraints()
    resolved = resolve(graph, demands, cluster.world_size)
    sizes = dict(resolved.micro_batch)
    if coupled == "mini_batch":
        for i, whole in enumerate(whole_batch_ops(graph)):
            if whole:
                sizes[i] = batch_size
    units = _units(graph, costs, cluster, batch_size, resolved, sizes, parts)
    memory = tuple(
        float(device.memory_bytes)
        if memory_limit is None
        else min(float(device.memory_bytes), memory_limit)
        for device in cluster.devices
    )
    fixed = [0] * len(units)
    pin: dict[int, int] = {}
    for op, u in units.unit_of_op.items():
        if op in sizes:
            fixed[u] = sizes[op]
        if op in resolved.pin:
            pin[u] = resolved.pin[op]
    space = Space(units, cluster, batch_size, memory, tuple(fixed), pin)
    check_sizes(space)
    return space


def _units(
    graph: ModelGraph,
    costs: CostTable,
    cluster: Cluster,
    batch_size: int,
    resolved: Resolved,
    sizes: dict[int, int],
    parts: int,
) -> UnitGraph:
    """Units whose ops agree on device and size; ops without a demand are a class of their own."""
    labels: dict[tuple[int | None, int], int] = {}
    apart: dict[int, int] = {}
    if sizes or resolved.pin:
        for i in range(len(graph.ops)):
            key = (resolved.pin.get(i), sizes.get(i, 0))
            apart[i] = labels.setdefault(key, len(labels))
    typical = max(1, batch_size // (4 * cluster.world_size))
    return build_units(
        graph,
        costs,
        cluster.kinds,
        micro_batch=min(typical, max(costs.micro_batches)),
        parts=parts,
        together=resolved.together,
        apart=apart,
    )


def _freedom(
    space: Space,
    micro_batches: Sequence[int] | None,
    copies: int | Sequence[int] | None,
    replicas: Sequence[int] | bool,
    recompute: bool | Literal["auto"],
    families: Sequence[str],
    stages: int | None,
    world: int,
) -> Freedom:
    if recompute not in (True, False, "auto"):
        raise PlanError("Unknown choice", where="recompute", expected="True, False or 'auto'",
                        got=repr(recompute))  # fmt: skip
    unknown = set(families) - {"graph", "chain", "sequential", "shared"}
    if unknown or not families:
        raise PlanError(
            "Unknown family of plans",
            where="families",
            expected="graph, chain, sequential or shared",
            got=", ".join(sorted(unknown)) or "none",
        )
    if micro_batches is not None:
        wrong = [size for size in micro_batches if not 1 <= size <= space.batch_size]
        if wrong or not micro_batches:
            raise PlanError(
                "A micro-batch size is out of range",
                where="micro_batches",
                expected=f"sizes from 1 to the mini-batch's {space.batch_size} samples",
                got=wrong or "none",
            )
    values = _copies(space, copies, world)
    if replicas is True:
        usual = {1, 2, 3, 4, 5, 6, 8, *((world,) if space.any_whole else ())}
        sizes: tuple[int, ...] = tuple(sorted(r for r in usual if r <= world))
    elif replicas is False:
        sizes = (1,)
    else:
        sizes = tuple(sorted({int(r) for r in replicas}))
        if not sizes or sizes[0] < 1 or sizes[-1] > world:
            raise PlanError(
                "A number of replicas is out of range",
                where="replicas",
                expected=f"numbers from 1 to the {world} devices",
                got=list(replicas),
            )
    if stages is not None and not 1 <= stages <= world * 64:
        raise PlanError("The number of stages is out of range", where="stages", got=stages)
    return Freedom(
        copies=values,
        micro_batches=None if micro_batches is None else tuple(sorted({*micro_batches})),
        replicas=sizes,
        recompute=recompute,
        families=tuple(name for name in families if name != "shared"),
        parts=stages,
    )


def _copies(space: Space, copies: int | Sequence[int] | None, world: int) -> tuple[int, ...]:
    """Values of R: those given, else the sensible ones."""
    most = min(world, space.batch_size)
    single = space.any_whole or bool(space.pin)
    if copies is None:
        if single:
            return (1,)
        exact = {r for r in range(1, most + 1) if world % r == 0}
        powers = {1 << k for k in range(most.bit_length()) if 1 << k <= most}
        # Numbers that divide leave nothing idle; a power of two may be worth a few idle devices.
        values = exact | {r for r in powers if world // r * r >= _LEAST_USED * world}
        return tuple(sorted(values))
    given = (copies,) if isinstance(copies, int) else tuple(copies)
    wrong = [r for r in given if not 1 <= r <= most]
    if wrong or not given:
        raise PlanError(
            "A number of copies is out of range",
            where="copies",
            expected=f"numbers from 1 to {most} (devices and samples)",
            got=wrong or "none",
        )
    if single and set(given) != {1}:
        raise PlanError(
            "A loss over the whole mini-batch, or a pinned module, allows one copy only",
            where="copies",
            expected=1,
            got=list(given),
            fix="Let the loss follow the micro-batch with coupled='micro_batch'"
            if space.any_whole
            else "Take the pins away",
        )
    return tuple(sorted({*given}))
