"""``compare``: our planner and the baselines on the same input, in one table.

Every planner gets the same units, costs and cluster, and every plan is judged by the same
simulator. Baselines run as published: one micro-batch size for all their stages (each is
tried, the fastest plan that fits is kept), a chain run as a chain. *All freedoms* is our
own search restricted to chains: micro-batch sizes, replicas, copies, slack, recomputation
and the simulator, on stages one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import ClassVar, NamedTuple

from pydantic import Field

from graphpipe.cost.cluster import Cluster
from graphpipe.cost.table import CostTable
from graphpipe.errors import InfeasibleError, PlanError
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.planner.baselines.downsets import DOWN_SET_LIMIT, DownSetLimitError
from graphpipe.planner.baselines.recipe import SearchTimeoutError
from graphpipe.planner.baselines.registry import BASELINES
from graphpipe.planner.baselines.search import fused_for_baselines, plan_baseline
from graphpipe.planner.lower_bound import lower_bound, plan_gap
from graphpipe.planner.search import make_space, plan
from graphpipe.planner.unit_graph import UnitGraph
from graphpipe.planner.whole import whole_batch_ops
from graphpipe.records import FileRecord, Record

OURS = "gpp"
CHAIN = "chain"
PLANNERS = (OURS, CHAIN, *BASELINES)
"""Everything that ``compare`` can run, in the order of its rows."""

FUSE_LIMITS = (DOWN_SET_LIMIT, 16_000, 6_000, 2_500, 1_500, 800, 300, 100)
"""Down-sets to which chains are fused, one after the other, where a baseline does not end."""

_COUPLED = (
    "the loss mixes samples and follows the micro-batch here; ours and the chain run it on the "
    "whole mini-batch"
)
_INTERRUPTED = "the search was interrupted: the best so far"
_CHAINS = ("chain", "sequential")


class ComparisonRow(Record):
    """What one planner found for one input; the figures of a plan are None without one.

    Attributes:
        model: Name of the graph.
        planner: One of :data:`PLANNERS`.
        variant: ``ours``, ``all freedoms`` or ``as published``.
        devices: Devices of the cluster.
        batch_size: B, samples.
        memory_bytes: Of the smallest device.
        units: Nodes of the graph that was searched.
        fused: Chains were fused first, because the planner did not end on the graph.
        down_sets: Of the graph that was searched, where they were counted.
        search_seconds: CPU time of the search, scheduling and simulation of candidates included
            for ours, over all micro-batch sizes for the others.
        longest_seconds: CPU time for the micro-batch size that took longest.
        iteration_ns: Simulated iteration.
        throughput: Samples per second.
        ratio: Throughput of ours over this one's; 1 for ours.
        bottleneck_ns: Busy time of the busiest device.
        bubble: Idle share of the devices in use.
        depth: Stages on the longest path.
        stages: How many there are.
        copies: R.
        micro_batches: Sizes of the stages' micro-batches, without repeats, ascending.
        peak_memory_bytes: Of the fullest device.
        lower_bound_ns: No plan is faster.
        lower_bound_gap: Share of the iteration above the bound: iteration / bound - 1.
        gap_parts: For ours: the parts of the gap to the bound in seconds, see
            :class:`~graphpipe.planner.lower_bound.Gap`.
        binding: Part of the lower bound that is largest.
        note: Why there is no plan, or why the graph was fused.
    """

    model: str
    planner: str
    variant: str
    devices: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    memory_bytes: int = Field(ge=0)
    units: int = Field(ge=0)
    fused: bool = False
    down_sets: int | None = Field(default=None, ge=1)
    search_seconds: float | None = Field(default=None, ge=0)
    longest_seconds: float | None = Field(default=None, ge=0)
    iteration_ns: int | None = Field(default=None, ge=0)
    throughput: float | None = Field(default=None, ge=0)
    ratio: float | None = Field(default=None, ge=0)
    bottleneck_ns: int | None = Field(default=None, ge=0)
    bubble: float | None = Field(default=None, ge=0, le=1)
    depth: int | None = Field(default=None, ge=0)
    stages: int | None = Field(default=None, ge=1)
    copies: int | None = Field(default=None, ge=1)
    micro_batches: tuple[int, ...] = ()
    peak_memory_bytes: int | None = Field(default=None, ge=0)
    lower_bound_ns: int = Field(default=0, ge=0)
    lower_bound_gap: float | None = None
    gap_parts: dict[str, float] = Field(default_factory=dict)
    binding: str = ""
    note: str = ""


class Comparison(FileRecord):
    """Rows of one or several comparisons."""

    file_kind: ClassVar[str] = "graphpipe-comparison"
    written_by: ClassVar[str] = "graphpipe compare MODEL -o FILE"
    file_version: ClassVar[int] = 1

    kind: str = file_kind
    version: int = file_version
    rows: tuple[ComparisonRow, ...] = ()


class Compared(NamedTuple):
    """A row with its plan, where there is one, and the units that were searched."""

    row: ComparisonRow
    plan: Plan | None
    units: UnitGraph


class Hopeless:
    """What is known not to end, so that larger inputs of the same kind are not tried again.

    A baseline that did not end on a graph with some number of devices will not end on the
    same graph with as many or more.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, int], tuple[int, str]] = {}

    def note(self, planner: str, graph: str, limit: int, devices: int, reason: str) -> None:
        """Remembers why a planner gave up on a graph fused to ``limit`` down-sets (0: as it is)."""
        key = (planner, graph, limit)
        if key not in self._known or devices < self._known[key][0]:
            self._known[key] = devices, reason

    def __call__(self, planner: str, graph: str, limit: int, devices: int) -> str | None:
        """Why there is no hope, or None where there is."""
        least, reason = self._known.get((planner, graph, limit), (devices + 1, ""))
        if least > devices:
            return None
        return reason if least in (1, devices) else f"{reason} (for {least} devices)"


class Contest:
    """One input that planners are run on, one after the other.

    Args:
        graph: The model and its loss.
        costs: Its costs.
        cluster: The devices.
        batch_size: B, samples.
        time_limit: CPU seconds for each baseline on one graph; one that takes longer gets a graph
            with its chains fused, and the row says so.
        hopeless: Shared between contests, to try nothing twice that did not end.

    Raises:
        CostError: if the costs belong to another graph or lack a kind of device.
    """

    def __init__(
        self,
        graph: ModelGraph,
        costs: CostTable,
        cluster: Cluster,
        batch_size: int,
        *,
        time_limit: float | None = 60.0,
        hopeless: Hopeless | None = None,
    ) -> None:
        self.cluster, self.batch_size = cluster, batch_size
        self.time_limit = time_limit
        self.hopeless = hopeless or Hopeless()
        self.bound = lower_bound(graph, costs, cluster, batch_size)
        space = make_space(graph, costs, cluster, batch_size=batch_size, coupled="micro_batch")
        self.units = space.units
        self._coupled = any(whole_batch_ops(graph))
        self._empty = ComparisonRow(
            model=graph.name,
            planner=OURS,
            variant="ours",
            devices=cluster.world_size,
            batch_size=batch_size,
            memory_bytes=min(device.memory_bytes for device in cluster.devices),
            units=len(self.units),
            lower_bound_ns=self.bound.nanoseconds,
            binding=self.bound.binding,
        )

    def run(self, planner: str) -> Compared:
        """What a planner finds; its row has no ratio yet (see :func:`with_ratios`).

        Raises:
            PlanError: for an unknown planner.
        """
        check_names([planner])
        if planner in (OURS, CHAIN):
            return self._run_ours(planner)
        found = self._run_baseline(planner)
        return _with_note(found, _COUPLED) if self._coupled else found

    def _run_ours(self, name: str) -> Compared:
        units = self.units
        variant = "ours" if name == OURS else "all freedoms"
        row = self._empty.model_copy(update={"planner": name, "variant": variant})
        search = partial(plan, units.graph, units.costs, self.cluster, batch_size=self.batch_size)
        start = time.process_time()
        try:
            best = search() if name == OURS else search(families=_CHAINS)
        except InfeasibleError as error:
            return Compared(row.model_copy(update={"note": error.what}), None, units)
        taken = time.process_time() - start
        assert best.prediction is not None
        filled = _filled(row, best, best.prediction.iteration_ns)
        parts = asdict(plan_gap(best, self.bound)) if name == OURS else {}
        note = _INTERRUPTED if _was_interrupted(best) else ""
        update = {"search_seconds": taken, "gap_parts": parts, "note": note}
        return Compared(filled.model_copy(update=update), best, units)

    def _run_baseline(self, name: str) -> Compared:
        units, devices = self.units, self.cluster.world_size
        row = self._empty.model_copy(update={"planner": name, "variant": "as published"})
        reason = ""
        for limit in (0, *FUSE_LIMITS):
            before = self.hopeless(name, units.graph.name, limit, devices)
            if before is not None:
                reason = reason or before
                continue
            try:
                given = units if not limit else self._fused(limit)
                found = plan_baseline(
                    name, given, self.cluster, self.batch_size, time_limit=self.time_limit
                )
            except DownSetLimitError:
                text = f"refuses the graph: more than {DOWN_SET_LIMIT} down-sets"
                self.hopeless.note(name, units.graph.name, limit, 1, text)
                reason = reason or text
                continue
            except SearchTimeoutError as error:
                text = f"did not end on {len(given)} units: {error.got or error.expected}"
                self.hopeless.note(name, units.graph.name, limit, devices, text)
                reason = reason or text
                continue
            except InfeasibleError as error:
                return Compared(row.model_copy(update={"note": error.what}), None, units)
            filled = _filled(row, found.plan, found.iteration_ns)
            update = {
                "units": found.units,
                "fused": bool(limit),
                "search_seconds": found.search_seconds,
                "longest_seconds": found.longest_seconds,
                "note": f"{reason}; {found.units} units after fusing" if reason else "",
            }
            return Compared(filled.model_copy(update=update), found.plan, given)
        return Compared(row.model_copy(update={"note": reason}), None, units)

    def _fused(self, limit: int) -> UnitGraph:
        typical = max(1, self.batch_size // (4 * self.cluster.world_size))
        return fused_for_baselines(self.units, self.cluster, typical, limit)


def check_names(planners: Sequence[str]) -> None:
    """Refuses names that are not in :data:`PLANNERS`.

    Raises:
        PlanError: for an unknown planner.
    """
    unknown = [name for name in planners if name not in PLANNERS]
    if unknown:
        raise PlanError(
            "Unknown planner", expected=", ".join(PLANNERS), got=", ".join(map(repr, unknown))
        )


def compare(
    graph: ModelGraph,
    costs: CostTable,
    cluster: Cluster,
    batch_size: int,
    *,
    planners: Sequence[str] = PLANNERS,
    time_limit: float | None = 60.0,
    hopeless: Hopeless | None = None,
    progress: Callable[[str], None] | None = None,
    keep: Callable[[Compared], None] | None = None,
) -> tuple[Compared, ...]:
    """Runs planners on one input.

    Args:
        graph: The model and its loss.
        costs: Its costs.
        cluster: The devices.
        batch_size: B, samples.
        planners: Names from :data:`PLANNERS`; ours always runs, since ratios are to it.
        time_limit: CPU seconds for each baseline on one graph; one that takes longer gets a graph
            with its chains fused, and the row says so.
        hopeless: Shared between comparisons, to try nothing twice that did not end.
        progress: Called with the name of each planner before it runs.
        keep: Called with what each planner found, its ratio included, as soon as it is there.

    Returns:
        A row for each planner, in the order of :data:`PLANNERS`.

    Raises:
        PlanError: for an unknown planner.
        CostError: if the costs belong to another graph or lack a kind of device.
        KeyboardInterrupt: if the user interrupts; ``keep`` has had what was found.
    """
    check_names(planners)
    contest = Contest(graph, costs, cluster, batch_size, time_limit=time_limit, hopeless=hopeless)
    found: list[Compared] = []
    for name in PLANNERS:
        if name not in planners and name != OURS:
            continue
        if progress is not None:
            progress(name)
        item = contest.run(name)
        row = with_ratios([*(each.row for each in found), item.row])[-1]
        found.append(item._replace(row=row))
        if keep is not None:
            keep(found[-1])
        if row.note == _INTERRUPTED:  # our search answers an interrupt with its best so far
            raise KeyboardInterrupt
    return tuple(found)


def with_ratios(rows: Sequence[ComparisonRow]) -> tuple[ComparisonRow, ...]:
    """The rows with the throughput of ours, on the same input, over that of each."""

    def key(row: ComparisonRow) -> tuple[str, int, int, int]:
        return row.model, row.devices, row.batch_size, row.memory_bytes

    ours = {key(row): row.iteration_ns for row in rows if row.variant == "ours"}
    found: list[ComparisonRow] = []
    for row in rows:
        base = ours.get(key(row))
        ratio = row.iteration_ns / base if row.iteration_ns is not None and base else None
        found.append(row.model_copy(update={"ratio": ratio}))
    return tuple(found)


def _was_interrupted(best: Plan) -> bool:
    return any("interrupted" in note for note in best.notes)


def _with_note(item: Compared, note: str) -> Compared:
    notes = [text for text in (item.row.note, note) if text]
    return item._replace(row=item.row.model_copy(update={"note": "; ".join(notes)}))


def _filled(row: ComparisonRow, best: Plan, iteration_ns: int) -> ComparisonRow:
    """The row with the figures of a plan."""
    prediction = best.prediction
    assert prediction is not None
    bound = row.lower_bound_ns
    return row.model_copy(
        update={
            "iteration_ns": iteration_ns,
            "throughput": best.batch_size * 1e9 / iteration_ns if iteration_ns else None,
            "bottleneck_ns": prediction.bottleneck_ns,
            "bubble": prediction.bubble,
            "depth": prediction.depth,
            "stages": len(best.stages),
            "copies": best.copies,
            "micro_batches": tuple(sorted({stage.micro_batch for stage in best.stages})),
            "peak_memory_bytes": max(prediction.peak_memory, default=0),
            "lower_bound_gap": iteration_ns / bound - 1 if bound else None,
        }
    )
