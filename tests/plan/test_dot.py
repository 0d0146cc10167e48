"""Plans in DOT."""

from __future__ import annotations

from graphpipe.plan.plan import Plan
from tests.plan.test_text import PROBLEM, plan


def test_stages_edges_and_escaped_names() -> None:
    made = plan()
    stage = type(made.stages[0])(**{**dict(made.stages[0]), "name": 'a"b\\c'})
    text = Plan(**{**dict(made), "stages": (stage, *made.stages[1:])}).to_dot()
    assert text.startswith("digraph plan {")
    assert r'label="0: a\"b\\c\ndevices 0-1\nb = 1, r = 2, W = 4\ntoy: 1.5 ms + none"' in text
    assert 's0 -> s1 [label="2 KiB + 16 B a micro-batch", style=dashed];' in text
    assert text.count("{") == text.count("}") == 1
    assert len(PROBLEM.stages) == text.count("[label=") - 1
