"""Still pictures of a plan, as SVG text: its stage graph, and its timeline.

For documents and notebooks; the HTML report is what one can explore. Names are escaped.
"""

from __future__ import annotations

from xml.etree import ElementTree

from graphpipe.plan.plan import Plan
from graphpipe.simulate.timeline import Event, Timeline
from graphpipe.simulate.usage import recompute_ns
from graphpipe.units import format_bytes, format_ns

_FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"
_TEXT, _MUTED, _LINE, _PAPER, _IDLE = "#1b2130", "#596275", "#c3c9d6", "#ffffff", "#eceef3"
# The palette of Okabe and Ito, as in the report's page: fill, text on it.
_COLOURS = {
    "F": ("#0067a8", "#ffffff"),
    "B": ("#e39a00", "#201600"),
    "recompute": ("#f4d58a", "#201600"),
    "all_reduce": ("#ad4c84", "#ffffff"),
    "optimizer": ("#6b7280", "#ffffff"),
}
_WORDS = {"F": "forward", "B": "backward", "all_reduce": "all-reduce"}
_CARD_WIDTH, _CARD_HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 176, 62, 30, 44, 16
_ROW, _GUTTER, _AXIS, _LEGEND = 28, 150, 24, 26


def stage_graph_svg(plan: Plan) -> str:
    """The stages in layers, the first on top and branches side by side."""
    layers = _layers(plan)
    widest = max(len(layer) for layer in layers)
    width = widest * (_CARD_WIDTH + _GAP_X) - _GAP_X + 2 * _MARGIN
    height = len(layers) * (_CARD_HEIGHT + _GAP_Y) - _GAP_Y + 2 * _MARGIN
    place: dict[int, tuple[float, float]] = {}
    for depth, layer in enumerate(layers):
        free = width - len(layer) * (_CARD_WIDTH + _GAP_X) + _GAP_X
        for column, stage in enumerate(layer):
            x = free / 2 + column * (_CARD_WIDTH + _GAP_X)
            place[stage] = (x, _MARGIN + depth * (_CARD_HEIGHT + _GAP_Y))
    root = _picture(width, height, f"Stage graph of {plan.model or 'a plan'}")
    for edge in plan.edges:
        per_sample = sum(tensor.bytes_per_sample for tensor in edge.tensors)
        _draw_edge(root, place[edge.source], place[edge.target], format_bytes(per_sample))
    for index, (x, y) in place.items():
        _draw_card(root, plan, index, x, y)
    return _text_of(root)


def timeline_svg(plan: Plan, timeline: Timeline, *, width: int = 960) -> str:
    """One row a device, time to the right; micro-batch numbers where they fit.

    Args:
        plan: The plan that the timeline is of.
        timeline: Predicted or measured.
        width: Of the picture, in pixels.
    """
    height = _AXIS + plan.world_size * _ROW + _LEGEND + _MARGIN
    root = _picture(width, height, f"Timeline of {plan.model or 'a plan'}")
    right = width - _MARGIN
    scale = (right - _GUTTER) / max(1, timeline.iteration_ns)
    for rank in range(plan.world_size):
        y = _AXIS + rank * _ROW
        names = " + ".join(plan.stages[s].name for s in plan.stages_of_device[rank]) or "idle"
        _label(root, _MARGIN, y + _ROW / 2, _cut(f"{rank}  {names}", 20), _TEXT, anchor="start")
        _box(root, _GUTTER, y + 2, right - _GUTTER, _ROW - 4, _IDLE)
    for event in timeline.events:
        _draw_event(root, plan, event, scale)
    _label(root, _GUTTER, _AXIS / 2, "0", _MUTED, anchor="start")
    _label(root, right, _AXIS / 2, format_ns(timeline.iteration_ns), _MUTED, anchor="end")
    _draw_legend(root, plan, timeline, height - _LEGEND / 2 - _MARGIN / 2)
    return _text_of(root)


def _layers(plan: Plan) -> list[list[int]]:
    """Stages by their distance from the sources, each layer in the order of its parents."""
    depth = [0] * len(plan.stages)
    for _ in plan.stages:
        for edge in plan.edges:
            depth[edge.target] = max(depth[edge.target], depth[edge.source] + 1)
    # A branch that is shorter than its neighbours hangs from its consumer, not from the top.
    for _ in plan.stages:
        for stage, edges in enumerate(plan.out_edges):
            if edges and not plan.in_edges[stage]:
                depth[stage] = min(depth[edge.target] for edge in edges) - 1
    layers: list[list[int]] = [[] for _ in range(max(depth) + 1)]
    for stage, level in enumerate(depth):
        layers[level].append(stage)
    column: dict[int, float] = {}
    for layer in layers:
        parents = {stage: [column[edge.source] for edge in plan.in_edges[stage]] for stage in layer}
        layer.sort(key=lambda s: sum(parents[s]) / len(parents[s]) if parents[s] else s)
        for index, stage in enumerate(layer):
            column[stage] = index - (len(layer) - 1) / 2
    return layers


def _draw_edge(
    root: ElementTree.Element, start: tuple[float, float], end: tuple[float, float], text: str
) -> None:
    x0, y0 = start[0] + _CARD_WIDTH / 2, start[1] + _CARD_HEIGHT
    x1, y1 = end[0] + _CARD_WIDTH / 2, end[1]
    bend = (y1 - y0) / 2
    path = f"M{x0:g},{y0:g} C{x0:g},{y0 + bend:g} {x1:g},{y1 - bend:g} {x1:g},{y1 - 5:g}"
    ElementTree.SubElement(
        root, "path", {"d": path, "fill": "none", "stroke": _MUTED, "stroke-width": "1.6"}
    )
    head = f"M{x1 - 4:g},{y1 - 8:g} L{x1:g},{y1:g} L{x1 + 4:g},{y1 - 8:g} z"
    ElementTree.SubElement(root, "path", {"d": head, "fill": _MUTED})
    middle = (y0 + y1) / 2
    half = len(text) * 3.2 + 4
    _box(root, (x0 + x1) / 2 - half, middle - 8, 2 * half, 16, _PAPER)
    _label(root, (x0 + x1) / 2, middle, text, _MUTED, size=10)


def _draw_card(root: ElementTree.Element, plan: Plan, index: int, x: float, y: float) -> None:
    stage = plan.stages[index]
    card = _box(root, x, y, _CARD_WIDTH, _CARD_HEIGHT, _PAPER)
    card.attrib.update({"stroke": _LINE, "rx": "7"})
    devices = ", ".join(str(rank) for rank in stage.devices)
    replicas = f" x {stage.replicas}" if stage.replicas > 1 else ""
    lines = (
        (_cut(stage.name, 24), _TEXT, "600"),
        (_cut(f"device {devices}, micro-batch {stage.micro_batch}{replicas}", 30), _TEXT, "400"),
        (f"in flight {stage.in_flight}", _MUTED, "400"),
    )
    for row, (text, colour, weight) in enumerate(lines):
        _label(root, x + 10, y + 14 + 17 * row, text, colour, anchor="start", weight=weight)


def _draw_event(root: ElementTree.Element, plan: Plan, event: Event, scale: float) -> None:
    x, y = _GUTTER + event.start_ns * scale, _AXIS + event.rank * _ROW + 2
    length = (event.end_ns - event.start_ns) * scale
    fill, ink = _COLOURS[event.kind]
    gap = 0.6 if length > 3 else 0.0
    _box(root, x, y, max(0.3, length - gap), _ROW - 4, fill)
    again = recompute_ns(plan, event) * scale
    if again:
        _box(root, x, y, again, _ROW - 4, _COLOURS["recompute"][0])
    if event.stage < 0 or length < 14:
        return
    several = len(plan.stages_of_device[event.rank]) > 1
    text = f"{event.stage}.{event.micro_batch}" if several else str(event.micro_batch)
    if length > 6.5 * len(text) + 3:
        _label(root, x + length / 2, y + _ROW / 2 - 2, text, ink)


def _draw_legend(root: ElementTree.Element, plan: Plan, timeline: Timeline, y: float) -> None:
    used = {event.kind for event in timeline.events}
    names = [(_WORDS.get(kind, kind), _COLOURS[kind][0]) for kind in _COLOURS if kind in used]
    if any(stage.recompute for stage in plan.stages):
        names.append(("recompute", _COLOURS["recompute"][0]))
    x: float = _GUTTER
    for name, colour in [*names, ("idle", _IDLE)]:
        _box(root, x, y - 6, 12, 12, colour)
        _label(root, x + 18, y, name, _MUTED, anchor="start")
        x += 34 + 6.4 * len(name)


def _picture(width: float, height: float, title: str) -> ElementTree.Element:
    root = ElementTree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {width:g} {height:g}",
            "width": f"{width:g}",
            "height": f"{height:g}",
            "font-family": _FONT,
            "role": "img",
        },
    )
    ElementTree.SubElement(root, "title").text = title
    _box(root, 0, 0, width, height, _PAPER).attrib["rx"] = "10"
    return root


def _box(
    root: ElementTree.Element, x: float, y: float, width: float, height: float, fill: str
) -> ElementTree.Element:
    numbers = {"x": x, "y": y, "width": width, "height": height}
    attributes = {key: f"{value:.6g}" for key, value in numbers.items()}
    return ElementTree.SubElement(root, "rect", {**attributes, "fill": fill, "rx": "2"})


def _label(
    root: ElementTree.Element,
    x: float,
    y: float,
    text: str,
    colour: str,
    *,
    anchor: str = "middle",
    size: int = 11,
    weight: str = "400",
) -> None:
    attributes = {
        "x": f"{x:.6g}",
        "y": f"{y:.6g}",
        "fill": colour,
        "font-size": str(size),
        "font-weight": weight,
        "text-anchor": anchor,
        "dominant-baseline": "central",
    }
    ElementTree.SubElement(root, "text", attributes).text = text


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _text_of(root: ElementTree.Element) -> str:
    # XML 1.0 cannot hold control characters, which a module's name might.
    for element in root.iter():
        if element.text:
            element.text = "".join(c if c.isprintable() else " " for c in element.text)
    ElementTree.indent(root, " ")
    return ElementTree.tostring(root, encoding="unicode") + "\n"
