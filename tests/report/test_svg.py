from __future__ import annotations

from xml.etree import ElementTree

from graphpipe.report.svg import stage_graph_svg, timeline_svg
from tests.report import factory

NAMESPACE = {"svg": "http://www.w3.org/2000/svg"}


def parse(text: str) -> tuple[ElementTree.Element, list[str]]:
    root = ElementTree.fromstring(text)
    return root, [node.text or "" for node in root.iterfind(".//svg:text", NAMESPACE)]


def position(text: str, name: str) -> tuple[float, float]:
    root, _ = parse(text)
    for node in root.iterfind(".//svg:text", NAMESPACE):
        if node.text == name:
            return float(node.attrib["x"]), float(node.attrib["y"])
    raise LookupError(name)


def test_branches_stand_side_by_side_and_the_head_below() -> None:
    plan, _ = factory.two_towers()
    picture = stage_graph_svg(plan)
    (image_x, image_y), (text_x, text_y) = (position(picture, f"{n}.0") for n in ("image", "text"))
    assert image_y == text_y
    assert abs(image_x - text_x) > 150
    assert position(picture, "head")[1] > position(picture, "text.1")[1] > text_y


def test_a_short_branch_hangs_from_its_consumer() -> None:
    stages = tuple(factory.stage(f"s{i}", (i,), 1, 1, 10) for i in range(4))
    edges = (factory.edge(0, 1), factory.edge(1, 3), factory.edge(2, 3))
    plan, _ = factory.run(stages, edges, 2, 4)
    picture = stage_graph_svg(plan)
    assert position(picture, "s2")[1] == position(picture, "s1")[1]


def test_edges_carry_their_bytes() -> None:
    plan, _ = factory.two_towers()
    assert parse(stage_graph_svg(plan))[1].count("2 KiB") == len(plan.edges)


def test_every_event_is_a_box_of_its_length() -> None:
    plan, timeline = factory.chain(2, 4)
    root, texts = parse(timeline_svg(plan, timeline, width=1000))
    blue = [box for box in root.iterfind(".//svg:rect", NAMESPACE) if box.get("fill") == "#0067a8"]
    forwards = [event for event in timeline.events if event.kind == "F"]
    assert len(blue) == len(forwards) + 1, "and one in the legend"
    span = (1000 - 16 - 150) * 1000 / timeline.iteration_ns
    assert abs(float(blue[0].attrib["width"]) - span) < 1
    assert {"forward", "backward", "optimizer", "idle"} <= set(texts)
    assert "recompute" not in texts


def test_recomputation_has_a_colour_of_its_own() -> None:
    plan, timeline = factory.two_towers()
    root, texts = parse(timeline_svg(plan, timeline))
    light = [box for box in root.iterfind(".//svg:rect", NAMESPACE) if box.get("fill") == "#f4d58a"]
    assert len(light) == 16 + 1
    assert "recompute" in texts


def test_names_are_escaped() -> None:
    plan, timeline = factory.hostile()
    for picture in (stage_graph_svg(plan), timeline_svg(plan, timeline)):
        assert "<script" not in picture
        _, texts = parse(picture)
        assert any(text.startswith("</script>") or "</script>" in text for text in texts)


def test_control_characters_do_not_break_the_picture() -> None:
    stages = (factory.stage("bell\x07\x00name", (0,), 1, 1, 10),)
    plan, timeline = factory.run(stages, (), 1, 1)
    assert "bell  name" in parse(stage_graph_svg(plan))[1]
    parse(timeline_svg(plan, timeline))
