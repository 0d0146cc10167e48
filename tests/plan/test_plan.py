"""Damaged plan files: refused by us, or harmless; never another exception, never a hang."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from graphpipe.errors import GraphPipeError
from graphpipe.plan.plan import Plan
from graphpipe.plan.validate import validate
from graphpipe.simulate.simulator import simulate
from tests.plan.plans import plan_of
from tests.plan.random_problems import random_problem
from tests.plan.test_validate import GRAPH, good

Path = tuple[str | int, ...]
NUMBERS = (0, 1, 2, 3, 10**6, 10**12, 2**63)
VALUES = (0, -1, 7, 10**18, "", "F0.0", "toy", None, True, [], {}, 0.5, 1e300, "F0.0 B0.0", [1, 0])


def originals() -> list[dict[str, Any]]:
    plans = [good(), *(plan_of(random_problem(seed)) for seed in range(6))]
    return [json.loads(plan.to_json()) for plan in plans]


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """All places in a JSON value, the top one left out."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield (*path, key)
        yield from paths(item, (*path, key))


def at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def damage(data: dict[str, Any], rng: random.Random) -> str:
    """Changes one place; returns the name of the field."""
    places = list(paths(data))
    if not places:
        return ""
    path = rng.choice(places)
    parent, key = at(data, path[:-1]), path[-1]
    kind = rng.random()
    old = parent[key]
    if kind < 0.6:
        if isinstance(old, bool):
            parent[key] = not old
        elif isinstance(old, int):
            parent[key] = rng.choice((old + 1, old - 1, 2 * old, *NUMBERS))
        elif isinstance(old, str) and " " in old:
            words = old.split()
            rng.shuffle(words) if rng.random() < 0.3 else words.pop(rng.randrange(len(words)))
            parent[key] = " ".join(words)
        else:
            parent[key] = rng.choice(VALUES)
    elif kind < 0.75 and isinstance(parent, list) and isinstance(key, int):
        parent.insert(key, copy.deepcopy(old))
    elif kind < 0.9:
        del parent[key]
    else:
        parent[key] = copy.deepcopy(at(data, rng.choice(places)))
    return str(next((k for k in reversed(path) if isinstance(k, str)), ""))


def campaign(seed: int, count: int) -> tuple[Counter[str], Counter[str]]:
    """Outcomes, and by field how many inputs got past the parser."""
    rng = random.Random(seed)
    samples = originals()
    outcomes: Counter[str] = Counter()
    fields: Counter[str] = Counter()
    for _ in range(count):
        data = copy.deepcopy(rng.choice(samples))
        changed = [damage(data, rng) for _ in range(rng.choice((1, 1, 2)))]
        try:
            plan = Plan.from_json(json.dumps(data))
        except GraphPipeError:
            outcomes["refused by the parser"] += 1
            continue
        fields.update(changed)
        try:
            validate(plan, GRAPH if plan.fingerprint else None)
        except GraphPipeError:
            outcomes["refused by the rules"] += 1
            continue
        simulate(plan)
        assert str(plan)
        assert plan.to_dot()
        outcomes["harmless"] += 1
    return outcomes, fields


def test_damaged_plans_are_refused_or_harmless() -> None:
    outcomes, fields = campaign(0, 400)
    assert sum(outcomes.values()) == 400
    assert outcomes["refused by the parser"] <= 280
    assert min(outcomes.values()) >= 20
    assert len(fields) >= 15


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(1, 5))
def test_thousands_of_damaged_plans(seed: int) -> None:
    outcomes, _ = campaign(seed, 8000)
    assert outcomes["refused by the parser"] <= 0.7 * 8000
