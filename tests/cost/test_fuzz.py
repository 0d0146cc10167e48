"""Damaged cost, cluster, device and profile files: our own error or a sound object, never else.

Files are damaged where they have structure: a value is replaced by one of another type or
range, a field is dropped, doubled or renamed, a list is shortened, the text is cut.
"""

from __future__ import annotations

import copy
import json
import random
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from graphpipe.cost.analytic import estimate
from graphpipe.cost.boxes import preset
from graphpipe.cost.catalogue import parse_devices
from graphpipe.cost.cluster import Cluster
from graphpipe.cost.cluster_file import read_toml
from graphpipe.cost.published.load import load_graph_file
from graphpipe.cost.table import CostTable
from graphpipe.errors import GraphPipeError
from tests.cost.graphs import mlp
from tests.cost.published.test_dnn_partitioning import TRAINING
from tests.cost.published.test_pipedream import TEXT
from tests.cost.published.test_piper import FILE
from tests.cost.test_catalogue import OWN
from tests.cost.test_cluster_file import LAB

Reader = Callable[[Path], object]
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**63, 10**400, 0.5, -0.5, 1e308, 1e-308, "", "a", "nan"),
    *([], {}, [None], {"a": 1}, [[]], "\u0000", "x" * 3000, float("nan"), float("inf")),
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        found += _places(item, (*path, key))
    return found


def _damaged(value: Any, draw: random.Random) -> tuple[Any, str]:
    """A damaged copy and the field that was damaged."""
    value = copy.deepcopy(value)
    place = draw.choice(_places(value))
    holder = value
    for key in place[:-1]:
        holder = holder[key]
    last = place[-1]
    match draw.randrange(5):
        case 0 if isinstance(holder, dict):
            del holder[last]
        case 1 if isinstance(holder, dict):
            holder[f"{last}_"] = holder.pop(last)
        case 2 if isinstance(holder, list):
            holder.insert(last, copy.deepcopy(holder[last]))
        case 3 if isinstance(holder[last], int | float) and not isinstance(holder[last], bool):
            holder[last] = holder[last] * draw.choice([-1, 0, 0.5, 2, 1e30])
        case _:
            holder[last] = copy.deepcopy(draw.choice(STRANGE))
    return value, ".".join("#" if isinstance(key, int) else str(key) for key in place)


def _json_text(value: Any, draw: random.Random) -> tuple[str, str]:
    damaged, field = _damaged(value, draw)
    text = json.dumps(damaged)
    if draw.random() < 0.1:
        return text[: draw.randrange(len(text))], "cut"
    return text, field


def _toml_text(text: str, draw: random.Random) -> tuple[str, str]:
    damaged, field = _damaged(tomllib.loads(text), draw)
    try:
        return tomli_w.dumps(damaged), field
    except (TypeError, ValueError):  # null and the like do not exist in TOML
        return text[: draw.randrange(len(text))], "cut"


def _pipedream_text(text: str, draw: random.Random) -> tuple[str, str]:
    lines = text.splitlines()
    row = draw.randrange(len(lines))
    match draw.randrange(4):
        case 0:
            del lines[row]
        case 1:
            lines.insert(row, lines[draw.randrange(len(lines))])
        case 2:
            words = lines[row].split(" ")
            words[draw.randrange(len(words))] = str(draw.choice(STRANGE))[:50]
            lines[row] = " ".join(words)
        case _:
            lines[row] = lines[row].replace("=", draw.choice(["=-", "=1e999", "", "=[", "=nan"]))
    return "\n".join(lines), f"line {row}"


def _costs() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        estimate(mlp(), "l4", micro_batches=[1, 8]).save(path)
        return json.loads(path.read_text(encoding="utf-8"))


def _plain() -> Any:
    node = {"fwd": 1.0, "bwd": 2.0, "param_bytes": 10, "act_bytes": 5, "out_bytes": 2.5}
    nodes = [{"id": name, **node} for name in ("a", "b", "c")]
    rest = {"devices": 2, "device_memory": 100, "mini_batch": 8, "bandwidth": 5.0}
    return {**rest, "nodes": nodes, "edges": [["a", "b"], ["b", "c"]]}


def _use_costs(path: Path) -> None:
    costs = CostTable.load(path)
    for size in (1, 3, 100):
        forward, backward = costs.op_seconds(next(iter(costs.devices)), size)
        assert not np.isnan(forward).any()
        assert not np.isnan(backward).any()
    costs.saved_bytes(range(len(costs.ops)), 4)


def _use_cluster(cluster: Cluster) -> None:
    everyone = tuple(range(min(cluster.world_size, 64)))
    assert cluster.all_reduce_seconds(everyone, 1e6) >= 0
    assert cluster.transfer_ns(0, everyone[-1], 1e6) >= 0


def _use_graph(path: Path) -> None:
    graph, costs, defaults = load_graph_file(path)
    costs.check(graph)
    assert np.isfinite(costs.op_seconds("x", 2)[0]).all()
    if defaults.devices is not None and defaults.devices < 1000:
        defaults.cluster()


COSTS = _costs()
FORMATS: dict[str, tuple[Callable[[random.Random], tuple[str, str]], Reader, str]] = {
    "costs": (lambda draw: _json_text(COSTS, draw), _use_costs, ".json"),
    "cluster-json": (
        lambda draw: _json_text(json.loads(preset("summit").to_json()), draw),
        lambda path: _use_cluster(Cluster.load(path)),
        ".json",
    ),
    "cluster-toml": (
        lambda draw: _toml_text(LAB, draw),
        lambda path: _use_cluster(read_toml(Cluster, path.read_text("utf-8"), where="x")),
        ".toml",
    ),
    "devices": (
        lambda draw: _toml_text(OWN, draw),
        lambda path: [
            spec.kernel_seconds(1e9, 1e6, 1, "float32")
            for spec in parse_devices(path.read_text("utf-8")).values()
        ],
        ".toml",
    ),
    "plain": (lambda draw: _json_text(_plain(), draw), _use_graph, ".json"),
    "piper": (lambda draw: _json_text(FILE, draw), _use_graph, ".json"),
    "dnn-partitioning": (lambda draw: _json_text(dict(TRAINING.values), draw), _use_graph, ".json"),
    "pipedream": (lambda draw: _pipedream_text(TEXT, draw), _use_graph, ".txt"),
}


def campaign(name: str, seed: int, count: int, folder: Path) -> Counter[str]:
    """Damages ``count`` files of a format; outcomes counted: accepted, refused, unreadable."""
    make, use, suffix = FORMATS[name]
    draw = random.Random(seed)
    outcomes: Counter[str] = Counter()
    path = folder / f"damaged{suffix}"
    for _ in range(count):
        text, _field = make(draw)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            use(path)
        except GraphPipeError as error:
            syntax = "not valid JSON" in str(error) or "not valid TOML" in str(error)
            outcomes["unreadable" if syntax or "Invalid JSON" in str(error) else "refused"] += 1
        else:
            outcomes["accepted"] += 1
    return outcomes


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_damaged_files(name: str, tmp_path: Path) -> None:
    outcomes = campaign(name, seed=1, count=150, folder=tmp_path)
    # Most damage must get past the parser, or the readers themselves are not tested.
    assert outcomes["refused"] + outcomes["accepted"] > 0.3 * outcomes.total()
    assert outcomes["refused"] > 0.1 * outcomes.total()


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_many_thousand_damaged_files(name: str, tmp_path: Path) -> None:
    outcomes = campaign(name, seed=2, count=8_000, folder=tmp_path)
    assert outcomes.total() == 8_000
    assert outcomes["refused"] + outcomes["accepted"] > 0.3 * outcomes.total()
