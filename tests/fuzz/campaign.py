"""Damaged files for every reader that we have; outcomes counted by format and by field.

``python -m tests.fuzz.campaign [--inputs 100000] [--json FILE] [--formats a,b]`` runs a campaign
and prints the counts. Each input is a good file damaged where it has structure (see
``tests/cost/test_fuzz.py`` and ``tests/plan/test_plan.py``). An input is *unreadable* if it is no
JSON or TOML at all, *refused* if an error of ours names what is wrong, *accepted* if it was read
and used without any error. Anything else ends the campaign and shows the input.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphpipe.errors import GraphPipeError
from graphpipe.graph.coarsen import coarsen
from graphpipe.graph.model_graph import ModelGraph
from graphpipe.plan.plan import Plan
from graphpipe.plan.validate import validate
from graphpipe.programs.planning import summary
from graphpipe.runtime.checkpoint.folder import parse_index
from graphpipe.runtime.checkpoint.values import decode
from graphpipe.simulate.simulator import simulate
from tests.cost import test_fuzz as cost_files
from tests.cost.graphs import mlp
from tests.plan import test_plan as plan_files
from tests.plan.test_validate import GRAPH
from tests.runtime.checkpoint.indices import good_index

Make = Callable[[random.Random], tuple[str, str]]
Use = Callable[[Path], object]


def _plan_text(draw: random.Random) -> tuple[str, str]:
    data = copy.deepcopy(draw.choice(_plans()))
    fields = [plan_files.damage(data, draw) for _ in range(draw.choice((1, 1, 2)))]
    return _maybe_cut(json.dumps(data), fields[0], draw)


_kept_plans: list[dict[str, Any]] = []


def _plans() -> list[dict[str, Any]]:
    if not _kept_plans:
        _kept_plans.extend(plan_files.originals())
    return _kept_plans


def _use_plan(path: Path) -> None:
    plan = Plan.load(path)
    validate(plan, GRAPH if plan.fingerprint else None)
    simulate(plan)
    assert str(plan)
    assert plan.to_dot()


def _use_model_graph(path: Path) -> None:
    graph = ModelGraph.load(path)
    assert graph.fingerprint
    assert str(graph)
    assert summary(graph)
    coarsen(graph, [1.0] * len(graph.ops), grain=2.0)


def _use_index(path: Path) -> None:
    index = parse_index(path.read_bytes(), str(path))
    training = index.training
    for value in (training.data, training.scale, training.random, list(training.schedulers)):
        decode(value, "x")
    if training.optimizer is not None:
        for group in training.optimizer.groups:
            decode(group.options, "x")


def _maybe_cut(text: str, field: str, draw: random.Random) -> tuple[str, str]:
    if draw.random() < 0.1:
        return text[: draw.randrange(len(text))], "(cut)"
    return text, field


GRAPH_FILE = json.loads(mlp().to_json())
INDEX_FILE = json.loads(good_index().to_json())
FORMATS: dict[str, tuple[Make, Use, str]] = {
    **cost_files.FORMATS,
    "plan": (_plan_text, _use_plan, ".json"),
    "graph": (
        lambda draw: cost_files._json_text(GRAPH_FILE, draw), _use_model_graph, ".json"
    ),
    "checkpoint": (lambda draw: cost_files._json_text(INDEX_FILE, draw), _use_index, ".json"),
}  # fmt: skip
"""By name: how damaged files are made, how they are read and used, their suffix."""


class UnexpectedError(AssertionError):
    """A reader raised something that is not an error of ours."""


def campaign(
    name: str, seed: int, count: int, folder: Path
) -> tuple[Counter[str], dict[str, Counter[str]]]:
    """Runs ``count`` inputs of a format; outcomes in all, and by damaged field.

    Raises:
        UnexpectedError: with the input, on any outcome but the three.
    """
    make, use, suffix = FORMATS[name]
    draw = random.Random(f"{name} {seed}")
    outcomes: Counter[str] = Counter()
    fields: dict[str, Counter[str]] = defaultdict(Counter)
    path = folder / f"damaged{suffix}"
    for number in range(count):
        text, field = make(draw)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        start = time.process_time()
        try:
            use(path)
        except GraphPipeError as error:
            outcome = "unreadable" if _syntax(str(error)) else "refused"
        except BaseException as error:
            raise UnexpectedError(
                f"{name}, seed {seed}, input {number} (field {field}): "
                f"{type(error).__name__}: {error}\n{text[:2000]}"
            ) from error
        else:
            outcome = "accepted"
        if time.process_time() - start > 20:
            raise UnexpectedError(
                f"{name}, input {number} (field {field}) took > 20 s: {text[:2000]}"
            )
        outcomes[outcome] += 1
        fields[field][outcome] += 1
    return outcomes, fields


def _syntax(text: str) -> bool:
    return any(
        x in text for x in ("no valid JSON", "not valid JSON", "not valid TOML", "Invalid JSON")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="of all formats together")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = options.formats.split(",")
    report: dict[str, Any] = {}
    total: Counter[str] = Counter()
    for name in names:
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            outcomes, fields = campaign(
                name, options.seed, -(-options.inputs // len(names)), Path(folder)
            )
        total += outcomes
        past = 1 - outcomes["unreadable"] / outcomes.total()
        print(
            f"{name:18} {outcomes.total():7} inputs, {past:4.0%} past the parser: "
            f"{outcomes['accepted']:6} accepted, {outcomes['refused']:6} refused, "
            f"{outcomes['unreadable']:6} unreadable; {len(fields):3} fields; "
            f"{time.process_time() - start:.0f} CPU-s",
            flush=True,
        )
        report[name] = {
            "outcomes": dict(outcomes),
            "fields": {k: dict(v) for k, v in fields.items()},
        }
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    past = 1 - total["unreadable"] / total.total()
    print(f"{'all':18} {total.total():7} inputs, {past:4.0%} past the parser: {dict(total)}")


if __name__ == "__main__":
    main()
