"""``write_report``: one HTML file that shows a plan and its timeline, and opens offline.

The file carries its own scripts and style. A content security policy forbids it every
connection and every script but those, by their hashes; names from the model reach the page
only as text of a JSON block and are put into the document as text, never as markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from collections.abc import Sequence
from importlib.resources import files

from graphpipe.errors import PlanError
from graphpipe.plan.plan import Plan
from graphpipe.planner.compare import Comparison, ComparisonRow
from graphpipe.report.data import report_data
from graphpipe.report.files import write_text
from graphpipe.simulate.timeline import Timeline

_ASSETS = files("graphpipe.report") / "assets"
_VENDOR = ("d3", "dagre")
_SCRIPTS = (
    "format",
    "model",
    "selection",
    "graph",
    "paint",
    "timeline",
    "memory",
    "tables",
    "main",
)


def write_report(
    plan: Plan,
    timeline: Timeline,
    *,
    path: str | os.PathLike[str],
    measured: Timeline | None = None,
    comparison: Comparison | None = None,
) -> None:
    """Writes the report of ``plan`` to ``path``.

    Args:
        plan: The plan to show.
        timeline: Its predicted iteration, from ``graphpipe.simulate``.
        path: The HTML file to write; it needs nothing but itself and a browser.
        measured: An iteration that was run, shown below the predicted one.
        comparison: Other planners' results; those for the plan's number of devices and
            mini-batch are shown.

    Raises:
        PlanError: if a timeline is of another number of devices or names a stage that the
            plan lacks, or nothing in the comparison is of this plan's size.
        FileFormatError: if the file cannot be written.
    """
    for each in (timeline,) if measured is None else (timeline, measured):
        _check(plan, each)
    text = render(plan, timeline, measured=measured, comparison=comparison)
    write_text(path, text, what="the report")


def render(
    plan: Plan,
    timeline: Timeline,
    *,
    measured: Timeline | None = None,
    comparison: Comparison | None = None,
) -> str:
    """The HTML text that :func:`write_report` writes."""
    rows = () if comparison is None else _rows_for(plan, comparison)
    data = report_data(plan, timeline, measured, rows)
    scripts = [_vendored(name) for name in _VENDOR]
    scripts += [_read(f"js/{name}.js") for name in _SCRIPTS]
    policy = "; ".join(
        (
            "default-src 'none'",
            "script-src " + " ".join(_hash_source(script) for script in scripts),
            "style-src 'unsafe-inline'",
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    parts = {
        "policy": html.escape(policy, quote=True),
        "title": html.escape(f"{plan.model or 'Plan'}: GraphPipe report"),
        "licences": "\n".join(_read(f"vendor/{name}.LICENSE").strip() for name in _VENDOR),
        "style": _read("report.css"),
        "data": _json_block(data),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    page = _read("report.html")
    before, *pieces = page.split("{{")
    out = [before]
    for piece in pieces:
        key, rest = piece.split("}}", 1)
        out += [parts[key], rest]
    return "".join(out)


def _check(plan: Plan, timeline: Timeline) -> None:
    if timeline.world_size != plan.world_size:
        raise PlanError(
            "The timeline is not of this plan",
            where="field 'world_size' of the timeline",
            expected=f"{plan.world_size} devices, as in the plan",
            got=timeline.world_size,
            fix="Simulate or run this plan and report that timeline",
        )
    strangers = [e for e in timeline.events if e.stage >= len(plan.stages)]
    if strangers:
        raise PlanError(
            "The timeline is not of this plan",
            where=f"an event of rank {strangers[0].rank}",
            expected=f"a stage from 0 to {len(plan.stages) - 1}",
            got=strangers[0].stage,
            fix="Simulate or run this plan and report that timeline",
        )


def _rows_for(plan: Plan, comparison: Comparison) -> Sequence[ComparisonRow]:
    wanted = (plan.model, plan.world_size, plan.batch_size)
    rows = [r for r in comparison.rows if (r.model, r.devices, r.batch_size) == wanted]
    if not rows:
        got = sorted({(r.model, r.devices, r.batch_size) for r in comparison.rows})
        raise PlanError(
            "The comparison is not of this plan's model and size",
            where="rows of the comparison",
            expected="model {!r} on {} devices with {} samples".format(*wanted),
            got="; ".join("model {!r} on {} devices with {} samples".format(*g) for g in got[:3])
            or "no row",
            fix="Compare with the plan's model, devices and mini-batch",
        )
    return rows


def _read(name: str) -> str:
    return _ASSETS.joinpath(name).read_text(encoding="utf-8")


def _vendored(name: str) -> str:
    # The source maps that these files point to are not shipped.
    text = _read(f"vendor/{name}.min.js")
    lines = [line for line in text.splitlines() if not line.startswith("//# sourceMappingURL=")]
    return "\n".join(lines)


def _hash_source(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _json_block(data: object) -> str:
    """JSON that cannot end the script element that holds it, whatever a name contains."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
