"""Graph pipeline parallelism for PyTorch.

``import graphpipe`` is quick: the names below are loaded when they are first used, and
torch with the first one that needs it.

Two functions share their name with a package of this library: ``graphpipe.plan`` and
``graphpipe.simulate`` are the functions; the packages are imported as usual
(``from graphpipe.plan.validate import ...``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from graphpipe.errors import GraphPipeError

if TYPE_CHECKING:
    from graphpipe.cost.analytic import estimate as estimate
    from graphpipe.cost.boxes import named_cluster as named_cluster
    from graphpipe.cost.catalogue import device as device
    from graphpipe.cost.cluster import Cluster as Cluster
    from graphpipe.cost.profiler.profile import profile as profile
    from graphpipe.cost.published.load import load_graph_file as load_graph_file
    from graphpipe.cost.table import CostTable as CostTable
    from graphpipe.cost.table import ParameterMemory as ParameterMemory
    from graphpipe.graph.capture import capture as capture
    from graphpipe.graph.model_graph import ModelGraph as ModelGraph
    from graphpipe.graph.split_joins import split_joins as split_joins
    from graphpipe.plan.plan import Plan as Plan
    from graphpipe.planner.constraints import Constraints as Constraints
    from graphpipe.planner.explain import explain as explain
    from graphpipe.planner.search import plan as plan
    from graphpipe.programs.elastic import elastic_plan as elastic_plan
    from graphpipe.runtime.checkpoint.folder import latest_checkpoint as latest_checkpoint
    from graphpipe.runtime.checkpoint.plain import load_state_dict as load_state_dict
    from graphpipe.runtime.emulate import emulate as emulate
    from graphpipe.runtime.launch import launch as launch
    from graphpipe.runtime.pipeline import Pipeline as Pipeline
    from graphpipe.simulate.simulator import simulate as simulate
    from graphpipe.simulate.timeline import Timeline as Timeline
    from graphpipe.zoo.job import Batch as Batch
    from graphpipe.zoo.job import Job as Job

__version__ = "0.1.0"

_HOME = {
    "Batch": "graphpipe.zoo.job",
    "Cluster": "graphpipe.cost.cluster",
    "Constraints": "graphpipe.planner.constraints",
    "CostTable": "graphpipe.cost.table",
    "Job": "graphpipe.zoo.job",
    "ModelGraph": "graphpipe.graph.model_graph",
    "ParameterMemory": "graphpipe.cost.table",
    "Pipeline": "graphpipe.runtime.pipeline",
    "Plan": "graphpipe.plan.plan",
    "Timeline": "graphpipe.simulate.timeline",
    "capture": "graphpipe.graph.capture",
    "device": "graphpipe.cost.catalogue",
    "elastic_plan": "graphpipe.programs.elastic",
    "emulate": "graphpipe.runtime.emulate",
    "estimate": "graphpipe.cost.analytic",
    "explain": "graphpipe.planner.explain",
    "latest_checkpoint": "graphpipe.runtime.checkpoint.folder",
    "launch": "graphpipe.runtime.launch",
    "load_graph_file": "graphpipe.cost.published.load",
    "load_state_dict": "graphpipe.runtime.checkpoint.plain",
    "named_cluster": "graphpipe.cost.boxes",
    "plan": "graphpipe.planner.search",
    "profile": "graphpipe.cost.profiler.profile",
    "simulate": "graphpipe.simulate.simulator",
    "split_joins": "graphpipe.graph.split_joins",
}
"""Module of each public name."""

__all__ = [
    "Batch",
    "Cluster",
    "Constraints",
    "CostTable",
    "GraphPipeError",
    "Job",
    "ModelGraph",
    "ParameterMemory",
    "Pipeline",
    "Plan",
    "Timeline",
    "capture",
    "device",
    "elastic_plan",
    "emulate",
    "estimate",
    "explain",
    "latest_checkpoint",
    "launch",
    "load_graph_file",
    "load_state_dict",
    "named_cluster",
    "plan",
    "profile",
    "simulate",
    "split_joins",
]

# Importing a submodule for the first time binds its name in this package. Doing it now,
# and taking the binding away, leaves the name free for the function, for good.
for _name in ("plan", "simulate"):
    importlib.import_module(f"graphpipe.{_name}")
    del globals()[_name]
del _name


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'graphpipe' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
