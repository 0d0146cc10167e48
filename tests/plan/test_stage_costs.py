"""Time and memory of stages, and the groups that share parameters."""

from __future__ import annotations

from graphpipe.cost.table import ParameterMemory
from graphpipe.graph.cut import stage_cut
from graphpipe.graph.model_graph import ModelGraph, Parameter, Storage
from graphpipe.plan.plan import ReduceGroup
from graphpipe.plan.stage import StageMemory, TaskTimes
from graphpipe.plan.stage_costs import (
    parameter_bytes,
    parameters_by_rank,
    reduce_groups,
    stage_memory,
    task_times,
)
from tests.plan.graphs import costs_of, two_towers


def graph_with(**fields: bool) -> ModelGraph:
    graph = two_towers()
    first, *rest = graph.parameters
    return ModelGraph(
        **{**dict(graph), "parameters": (Parameter(**{**dict(first), **fields}), *rest)}
    )


def test_buffers_and_frozen_parameters_have_no_gradient_and_no_state() -> None:
    factors = ParameterMemory(1.5, 1.0, 2.0)
    assert parameter_bytes(two_towers(), factors, ["i1.w"]) == (60, 40, 80)
    assert parameter_bytes(graph_with(trainable=False), factors, ["i1.w"]) == (60, 0, 0)
    assert parameter_bytes(graph_with(is_buffer=True), factors, ["i1.w"]) == (40, 0, 0)


def test_reduce_groups_leave_out_what_is_not_trained() -> None:
    held = parameters_by_rank([stage_cut(two_towers(), ("i1", "i2"))], [(0, 2)], world_size=3)
    assert held == (frozenset({"i1.w", "i2.w"}), frozenset(), frozenset({"i1.w", "i2.w"}))
    trained = frozenset({"i1.w", "i2.w"})
    one = ReduceGroup(ranks=(0, 2), parameters=("i2.w",), nbytes=80)
    assert reduce_groups(graph_with(trainable=False), held, trained) == (one,)
    assert reduce_groups(graph_with(is_buffer=True), held, trained) == (one,)
    assert reduce_groups(two_towers(), held, frozenset({"i2.w"})) == (one,)


def test_times_follow_the_micro_batch_and_the_correction() -> None:
    graph = two_towers()
    costs = costs_of(graph)
    cut = stage_cut(graph, ("i1", "i2"))
    options = {"has_backward": True, "recompute": False}
    times = [task_times(graph, costs, cut, "toy", b, **options).forward_ns for b in (1, 3, 32)]
    assert times == [2000, 6000, 64000]
    corrected = type(costs)(
        **{
            **{k: getattr(costs, k) for k in costs.__dataclass_fields__},
            "corrections": {"toy": (0.5, 2.0)},
        }
    )
    assert task_times(graph, corrected, cut, "toy", 1, **options) == TaskTimes(
        forward_ns=1000, backward_ns=8000
    )


def test_recomputation_never_keeps_more_than_the_stage_itself_would() -> None:
    graph = two_towers(i2={"output": {"shape": ("b", 400), "dtype": "float32"}})
    costs = costs_of(graph)
    cut = stage_cut(graph, ("join", "loss"))
    memory = stage_memory(graph, costs, cut, 1, has_backward=True, recompute=True)
    assert memory == StageMemory(
        parameters=200, gradients=200, optimizer=400, saved_per_micro_batch=84, recompute=84,
        workspace=6,
    )  # fmt: skip


def test_what_a_stage_hands_on_is_held_once() -> None:
    kept = {"saves": (Storage(id="i2", bytes="16*b"),)}
    options = {"has_backward": True, "recompute": False}

    def saved(graph: ModelGraph, **changes: bool) -> int:
        cut = stage_cut(graph, ("i1", "i2"))
        memory = stage_memory(graph, costs_of(graph), cut, 2, **{**options, **changes})
        return memory.saved_per_micro_batch

    ops = 2 * (10 + 2 * 32)
    assert saved(two_towers()) == ops + 2 * 16
    # An op keeps that tensor anyhow: its memory is among what the ops keep.
    assert saved(two_towers(i2=kept)) == ops
    # Recomputation lets go of what ops keep, but the output waits for its own backward.
    assert saved(two_towers(i2=kept), recompute=True) == 2 * 16
    assert saved(two_towers(), has_backward=False) == 0
    join = stage_cut(two_towers(), ("join", "loss"))
    costs = costs_of(two_towers())
    assert stage_memory(two_towers(), costs, join, 2, **options).saved_per_micro_batch == ops
