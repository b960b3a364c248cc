"""Waves as the engine told them, cones as they were counted, and nothing in a page that is not escaped."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import conewise as cw
from conewise.errors import GraphError, MissingSiteError
from conewise.report import sketch
from conewise.report.folded import Folded
from conewise.report.folding import fold
from conewise.report.wave import (
    GraphWave,
    cone_svg,
    cone_text,
    data,
    graph_sketch,
    show,
    style,
    value_text,
    wave_page,
    wave_svg,
)
from tests.report.figure import FIGURE, figure
from tests.sweeps import small

EVIL = "</script><img src=x onerror=alert(1)>"


def chain() -> cw.Graph:
    """Two sources make h; h makes left, x makes right; both make y. And a node that y does not need."""
    graph = cw.Graph()
    graph.source("x", 3.0)
    graph.source("w", 2.0, param=True)
    graph.node("h", lambda x, w: x * w, ["x", "w"])
    graph.node("left", lambda h: h + 1.0, ["h"])
    graph.node("right", lambda x: -x, ["x"])
    graph.node("y", lambda a, b: a * b, ["left", "right"])
    graph.node("aside", lambda h: h, ["h"])
    return graph


@cache
def folded() -> Folded:
    model = small.model()
    places = [("z", 0), ("z", 1), ("mlp_out", 0), ("q", 1)]
    return fold(model, places, base=model.run(input_ids=small.prompts(1, 2)))


def hostile() -> Folded:
    """The same with names that a page must not take for markup."""
    good = folded()
    parts = tuple(replace(part, label=EVIL, meaning=EVIL) for part in good.parts)
    cones = tuple(replace(cone, names=(f"{EVIL}{at}",)) for at, cone in enumerate(good.cones))
    return replace(good, model=EVIL, parts=parts, cones=cones, demanded=(EVIL,))


# -- what is recorded ------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["x", "h", "left", "right", "y"])
@pytest.mark.parametrize("value", [10.0, lambda own: own * 2], ids=["value", "function"])
def test_a_recorded_wave_is_the_ledger_of_such_a_fork(site: str, value: Any) -> None:
    graph = chain()
    (wave,) = GraphWave.record(graph, {site: value}, "y").waves
    base = cw.World(graph)
    base.demand("y")
    with base.fork() as world:
        world.patch(site, value)
        planned = world.plan("y").sites
        world.demand("y")
        assert list(wave.invalidated) == world.ledger.invalidated
        assert list(wave.recomputed) == world.ledger.recomputed
        assert list(wave.reused) == world.ledger.reused
        assert wave.planned == planned


def test_a_wave_tells_what_changed_and_that_nothing_is_restored() -> None:
    found = GraphWave.record(chain(), {"h": 10.0}, ["y"])
    (wave,) = found.waves
    assert wave.invalidated == ("left", "y")
    assert wave.recomputed == ("left", "y")
    assert wave.reused == ("h", "right")
    assert (found.before["y"], wave.after) == ("-21", {"h": "10", "left": "11", "y": "-33"})
    assert wave.restored == 0
    assert found.full_evaluations == 4
    assert "aside" not in found.before  # no one asked for it, so it has no value


def test_a_world_may_be_the_baseline() -> None:
    base = cw.World(chain())
    base.patch("right", 100.0)
    found = GraphWave.record(base, {"h": 0.0, "x": 1.0}, "y")
    assert found.before["y"] == "700"
    assert [wave.after["y"] for wave in found.waves] == ["100", "300"]


def test_a_graph_too_large_to_be_drawn_is_refused() -> None:
    graph = cw.Graph()
    graph.source("n0", 0)
    for number in range(1, 500):
        graph.node(f"n{number}", lambda x: x, [f"n{number - 1}"])
    with pytest.raises(GraphError, match=r"500 nodes.*up to 400.*fold\(model, sites\)"):
        GraphWave.record(graph, {"n1": 1}, "n499")


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7.0, "7"),
        (1 / 3, "0.3333"),
        (np.float32(0.5), "0.5"),
        (np.ones((4, 9)), "4×9, norm 6"),
        (np.array(["a", "b"]), "ndarray"),
        (np.array(2.0), "2"),
        ("x" * 50, "'" + "x" * 22 + "…"),
        (Unshowable(), "Unshowable"),
    ],
)
def test_values_in_a_few_characters(value: Any, text: str) -> None:
    assert value_text(value) == text


# -- drawings --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folded", "graph"])
def test_no_two_boxes_overlap_and_all_are_in_view(kind: str) -> None:
    drawn = (
        sketch.folded_sketch(folded())
        if kind == "folded"
        else graph_sketch(GraphWave.record(chain(), {"h": 1.0}, "y"))
    )
    for at, box in enumerate(drawn.boxes):
        assert box.x >= 0
        assert box.y >= 0
        assert box.x + box.width <= drawn.width
        assert box.y + box.height <= drawn.height
        for other in drawn.boxes[:at]:
            apart_x = box.x >= other.x + other.width or other.x >= box.x + box.width
            apart_y = box.y >= other.y + other.height or other.y >= box.y + box.height
            assert apart_x or apart_y, (box, other)


def test_every_edge_of_a_small_graph_is_a_wire() -> None:
    graph = chain()
    drawn = graph_sketch(GraphWave.record(graph, {"h": 1.0}, "y"))
    names = list(graph.sites)
    assert {(names[a], names[b]) for a, b, _ in drawn.wires} == set(graph.edges)


def test_a_drawing_in_a_file_paints_the_cone() -> None:
    svg = ET.fromstring(cone_svg(folded(), "z[layer=1, head=0]"))
    cone = folded().cone("z[layer=1]")
    found = [group for group in svg.iter("{http://www.w3.org/2000/svg}g") if "data-item" in group.attrib]
    assert [int(group.attrib["data-item"]) for group in found] == list(range(len(folded().parts)))
    for at, group in enumerate(found):
        classes = group.attrib["class"].split()
        assert ("is-done" in classes) == (cone.recomputed[at] > 0)
        assert ("is-site" in classes) == (at in cone.at)
        assert ("is-reused" in classes) == (cone.reused[at] > 0)
    assert "var(" not in ET.tostring(svg, encoding="unicode")  # not every viewer knows variables
    assert f"{cone.node_evaluations:,} of {folded().full_evaluations:,} nodes" in svg.attrib["aria-label"]


def test_a_part_of_which_some_is_recomputed_is_filled_in_part() -> None:
    cone = folded().cone("q[layer=1]")
    at = next(at for at, part in enumerate(folded().parts) if 0 < cone.recomputed[at] < part.nodes)
    svg = ET.fromstring(cone_svg(folded(), "q[layer=1]"))
    group = next(g for g in svg.iter() if g.attrib.get("data-item") == str(at))
    widths = {
        rect.attrib["class"]: float(rect.attrib["width"]) for rect in group.iter() if "width" in rect.attrib
    }
    share = cone.recomputed[at] / folded().parts[at].nodes
    assert widths["cw-done"] == pytest.approx(widths["cw-box"] * share, rel=1e-4)


def test_the_figure_of_the_reference_is_what_a_recorded_wave_draws() -> None:
    """The reference says: six nodes. To write the figure anew: `python -m tests.report.figure`."""
    assert figure() == FIGURE.read_text(encoding="utf-8")
    drawn = ET.fromstring(figure())
    assert (
        len([group for group in drawn.iter() if "is-done" in group.attrib.get("class", "").split()]) == 6 + 1
    )  # key


def test_a_wave_that_was_not_recorded_cannot_be_drawn() -> None:
    with pytest.raises(MissingSiteError, match="no wave of 'y' was recorded, only of h"):
        wave_svg(GraphWave.record(chain(), {"h": 1.0}, "y"), "y")


def test_a_cone_as_text_counts_every_row() -> None:
    text = cone_text(folded(), "z[layer=1, head=0]")
    head, _, *rows = text.splitlines()
    cone = folded().cone("z[layer=1]")
    assert head.startswith(
        f"z[layer=1, head=0]: {cone.node_evaluations} of {folded().full_evaluations} nodes"
    )
    assert [row.split()[0] for row in rows if row.startswith("◆")] == ["◆"]
    assert sum(int(re.findall(r"(\d+) of", row)[-1]) for row in rows) == cone.node_evaluations
    assert next(row for row in rows if row.startswith("◆")).split()[1:3] == ["layer", "1"]


def test_a_site_without_a_cone_is_an_error() -> None:
    with pytest.raises(MissingSiteError, match="no cone of 'nothing'"):
        cone_svg(folded(), "nothing")


# -- pages -----------------------------------------------------------------------------------


class Elements(HTMLParser):
    """The elements of a page as a browser's parser would find them: names, attributes, text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, text: str) -> None:
        if self.found and self.found[-1][0] == "script":
            self.scripts[-1] += text


def pages() -> dict[str, str]:
    graph = cw.Graph()
    graph.source(EVIL, 1.0)
    graph.node(f"{EVIL}2", lambda x: x, [EVIL])
    return {
        "model": wave_page(hostile(), title=EVIL),
        "graph": wave_page(graph, {EVIL: 2.0}, title=EVIL),
    }


@pytest.mark.parametrize("kind", ["model", "graph"])
def test_names_are_text_and_never_markup(kind: str) -> None:
    page = pages()[kind]
    elements = Elements(page)
    assert not [tag for tag, _ in elements.found if tag in {"img", "iframe", "object", "embed", "link"}]
    assert not [attrs for _, attrs in elements.found if any(name.startswith("on") for name in attrs)]
    held = [text for text in elements.scripts if "conewise " in text and text.startswith("{")]
    assert any(EVIL in json.dumps(json.loads(text)) for text in held)


@pytest.mark.parametrize("kind", ["model", "graph"])
def test_a_page_asks_for_nothing_from_anywhere(kind: str) -> None:
    page = pages()[kind]
    assert set(re.findall(r"https?://[^\"' )]+", page)) == {"http://www.w3.org/2000/svg"}
    elements = Elements(page)
    assert not [attrs for _, attrs in elements.found if {"src", "href"} & set(attrs)]
    policies = [attrs["content"] for tag, attrs in elements.found if tag == "meta" and "content" in attrs]
    assert any("default-src 'none'" in (policy or "") for policy in policies)


@pytest.mark.parametrize("kind", ["model", "graph"])
def test_every_id_is_there_once(kind: str) -> None:
    ids = [attrs["id"] for _, attrs in Elements(pages()[kind]).found if "id" in attrs]
    assert len(ids) == len(set(ids))
    controls = {
        f"wave-{name}" for name in ("first", "prev", "play", "next", "last", "slider", "place", "pick")
    }
    ledger = {f"wave-{name}" for name in ("invalidated", "recomputed", "reused", "kept")}
    expected = {"wave-view", "wave-site", *controls, *ledger} | (
        {"cone-view", "cone-site"} if kind == "model" else set()
    )
    assert expected <= set(ids)


def test_the_styles_touch_nothing_else_on_a_page() -> None:
    bare = re.sub(r"@(container|media)[^{]*\{|/\*.*?\*/", "", style())
    selectors = [one.strip() for rule in re.findall(r"([^{}]+)\{", bare) for one in rule.split(",")]
    assert len(selectors) > 60
    assert not [one for one in selectors if not re.match(r"\.(cw-|is-[a-z:().-]+ \.cw-|wave-step)", one)]


def test_the_data_of_a_graph_are_numbers_of_nodes() -> None:
    found = GraphWave.record(chain(), {"h": 10.0}, "y")
    told = data(found)["conewise-waves"]
    assert told["kind"] == "conewise waves"
    names = [name for name, _ in told["nodes"]]
    assert [names[at] for at in told["waves"][0]["recomputed"]] == ["left", "y"]
    assert [names[at] for at in told["waves"][0]["reused"]] == ["h", "right"]
    assert [name for name, is_source in told["nodes"] if is_source] == ["x", "w"]


def test_a_page_is_written_where_it_is_wanted(tmp_path: Path) -> None:
    page = wave_page(chain(), patches={"h": 10.0}, targets=["y"], out=tmp_path / "wave.html")
    assert (tmp_path / "wave.html").read_text(encoding="utf-8") == page


def test_the_targets_are_the_ends_of_the_graph_unless_others_are_named() -> None:
    found = json.loads(
        next(t for t in Elements(wave_page(chain(), {"h": 10.0})).scripts if t.startswith("{"))
    )
    assert [found["nodes"][at][0] for at in found["targets"]] == ["y", "aside"]


def test_a_notebook_shows_the_page_in_a_frame_of_its_own() -> None:
    framed = show(chain(), {"h": 10.0}, "y")
    ((tag, attrs),) = Elements(framed._repr_html_()).found
    assert (tag, attrs["sandbox"]) == ("iframe", "allow-scripts")
    assert attrs["srcdoc"] == framed.page == wave_page(chain(), {"h": 10.0}, "y")
