"""Training on whatever devices there are: a new plan at every start, the last checkpoint in it.

Under torchrun's elastic mode the workers are started again whenever a node is lost or comes
back. Each start plans for the ranks that are there; the checkpoint is re-sharded by loading
it. See ``docs/elastic.md`` for how to start agents so that any of them may die.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from graphpipe.cost.analytic import estimate
from graphpipe.cost.catalogue import device as find_device
from graphpipe.cost.cluster import Cluster, Device
from graphpipe.errors import GraphPipeError, PlanError, RuntimeSetupError
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.planner.search import plan as search
from graphpipe.runtime.process_group import ensure_process_group


@dataclass(frozen=True)
class _Here:
    """What one rank says of its device."""

    node: int
    kind: str


def elastic_plan(
    graph: ModelGraph,
    *,
    batch_size: int,
    device: str = "cpu-core",
    optimizer: str = "adamw",
    precision: str = "fp32",
    timeout: float = 1800.0,
) -> Plan:
    """The plan for the ranks of this start. Every rank must call it, before its Pipeline.

    The mini-batch is the same whatever the devices are, so that steps, data order and learning
    rates go on as they were. Rank 0 plans, on estimated costs; the others get its plan.

    Args:
        graph: As ``capture`` returned it.
        batch_size: B, samples.
        device: Kind of this rank's device; may differ between ranks.
        optimizer: For the estimate.
        precision: For the estimate.
        timeout: Seconds after which a rank that does not answer is a failure.

    Raises:
        RuntimeSetupError: if agents that may die hold the store that the others need.
        InfeasibleError: on every rank, if no plan fits the devices that are left.
    """
    check_store()
    ensure_process_group(torch.device("cpu"), timeout)
    node = int(os.environ.get("GROUP_RANK", "0"))
    world = dist.get_world_size()
    here: list[Any] = [None] * world
    dist.all_gather_object(here, _Here(node, find_device(device).name))
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            cluster = cluster_of([(item.node, item.kind) for item in here])
            costs = estimate(graph, cluster, optimizer=optimizer, precision=precision)
            answer = [search(graph, costs, cluster, batch_size=batch_size).to_json()]
        except GraphPipeError as error:
            answer = [error]
        except Exception as error:  # the others must not wait for a plan
            answer = [PlanError(f"Rank 0 cannot plan: {type(error).__name__}: {error}")]
    dist.broadcast_object_list(answer, 0)
    if isinstance(answer[0], GraphPipeError):
        raise answer[0]
    return Plan.from_json(answer[0], where="the plan of rank 0")


def cluster_of(ranks: list[tuple[int, str]]) -> Cluster:
    """The cluster of ranks on these (node, kind of device); links as the catalogue has them."""
    # Nodes that were lost leave gaps in torchrun's numbers; a cluster has none.
    numbers = {node: number for number, node in enumerate(sorted({node for node, _ in ranks}))}
    devices = tuple(
        Device(kind=kind, memory_bytes=find_device(kind).memory_bytes, node=numbers[node])
        for node, kind in ranks
    )
    slowest = min(
        (find_device(kind).default_network for _, kind in ranks),
        key=lambda network: network.inter_node_bandwidth or float("inf"),
    )
    return Cluster(name=f"{len(devices)} ranks", devices=devices, network=slowest)


def check_store() -> None:
    """Makes sure that no agent's death takes the workers' store with it.

    By default torchrun keeps the store that workers meet at in the agent of rank 0, and the
    other agents go on naming that one when it has died.

    Raises:
        RuntimeSetupError: under an elastic torchrun of that kind.
    """
    several = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    if several and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise RuntimeSetupError(
            "The store of this run lives in one of the agents, whose death would end all",
            where="TORCHELASTIC_USE_AGENT_STORE",
            expected="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of every torchrun",
            fix="Set it, and start 'graphpipe rendezvous' on a machine that stays; "
            "docs/elastic.md shows the whole command",
        )
