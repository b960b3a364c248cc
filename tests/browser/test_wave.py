"""Cones and waves as a reader has them: stepped through, clicked, played, on a phone and in the dark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

import conewise as cw
from conewise.anatomy.selectors import Cell
from conewise.report.folded import Cone, Folded
from conewise.report.folding import fold
from conewise.report.wave import GraphWave, wave_page
from tests.browser.conftest import Opener
from tests.sweeps import small

pytestmark = pytest.mark.browser

PHASES = ["baseline", "patch", "invalidate", "demand", "recompute", "read", "drop"]
EVIL = "</script><img src=x onerror=alert(1)>"


def graph() -> cw.Graph:
    made = cw.Graph()
    made.source("x", 3.0)
    made.source("w", 2.0, param=True)
    made.node("h", lambda x, w: x * w, ["x", "w"])
    made.node("left", lambda h: h + 1.0, ["h"])
    made.node("right", lambda x: -x, ["x"])
    made.node("y", lambda a, b: a * b, ["left", "right"])
    made.node(EVIL, lambda h: h, ["h"])
    return made


@cache
def recorded() -> GraphWave:
    patches = {"h": 10.0, "right": 0.0, "x": 1.0, EVIL: 5.0}
    return GraphWave.record(graph(), patches, ["y", EVIL])


@cache
def cells() -> tuple[Cell, ...]:
    groups = [
        [cw.site("z", layer=layer, head=head)] for layer in range(small.LAYERS) for head in range(small.HEADS)
    ]
    groups += [
        [cw.site("q", layer=1, pos=[1, 2])],
        [cw.site("lm_head")],
        [cw.site("mlp_out", layer=0, pos=-1)],
    ]
    groups += [[cw.site("z", layer=0, head=1), cw.site("mlp_out", layer=1)]]
    return tuple(Cell(tuple(group), 0) for group in groups)


@cache
def folded() -> Folded:
    model = small.model()
    return fold(model, cells(), base=model.run(input_ids=small.prompts(1, 2)))


@pytest.fixture(scope="module")
def graph_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wave") / "graph.html"
    wave_page(recorded(), title=f"A wave {EVIL}", out=path)
    return path


@pytest.fixture(scope="module")
def model_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wave") / "model.html"
    wave_page(folded(), out=path)
    return path


def items(page: Page, state: str, view: str = "#wave-view") -> set[int]:
    """The numbers of the items that are painted so."""
    found = page.locator(f"{view} .cw-item.{state}").evaluate_all(
        "all => all.map(one => Number(one.dataset.item))"
    )
    return set(found)


def number(page: Page, selector: str) -> int:
    return int(page.locator(selector).inner_text().replace(",", ""))


def ledger(page: Page) -> dict[str, int]:
    return {kind: number(page, f"#wave-{kind}") for kind in ("invalidated", "recomputed", "reused")}


def stepped(page: Page) -> Iterator[tuple[str, dict[str, int]]]:
    """Every step from the first to the last: its phase, and the ledger so far."""
    page.click("#wave-first", force=True)
    while True:
        yield str(page.locator("#wave-view").get_attribute("data-phase")), ledger(page)
        if page.locator("#wave-next").is_disabled():
            return
        page.click("#wave-next")


def counted(cone: Cone) -> dict[str, int]:
    return {
        "invalidated": sum(cone.invalidated),
        "recomputed": sum(cone.recomputed),
        "reused": sum(cone.reused),
    }


# -- a small graph ---------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["h", "right", "x", EVIL])
def test_a_wave_is_played_as_the_engine_told_it(graph_page: Path, open_page: Opener, site: str) -> None:
    page = open_page(graph_page).page
    page.select_option("#wave-pick", label=site)
    wave = next(wave for wave in recorded().waves if wave.site == site)
    steps = list(stepped(page))
    assert [phase for at, (phase, _) in enumerate(steps) if at == 0 or steps[at - 1][0] != phase] == [
        phase for phase in PHASES if wave.recomputed or phase not in {"invalidate", "recompute"}
    ]
    for before, after in pairwise(steps):
        assert all(before[1][kind] <= after[1][kind] for kind in after[1])
    assert steps[-1][1] == {
        "invalidated": len(wave.invalidated),
        "recomputed": len(wave.recomputed),
        "reused": len(wave.reused),
    }
    for phase in PHASES:
        button = page.locator(f".cw-phases button:text-is('{phase.title()}')")
        assert button.is_enabled() == any(phase == told for told, _ in steps)
    # Node by node: one step of recomputation for each node that the engine recomputed.
    assert sum(phase == "recompute" for phase, _ in steps) == len(wave.recomputed)


def test_each_phase_paints_what_it_tells(graph_page: Path, open_page: Opener) -> None:
    page = open_page(graph_page).page
    page.select_option("#wave-pick", label="h")
    wave = next(wave for wave in recorded().waves if wave.site == "h")
    at = {site: place for place, site in enumerate(recorded().nodes)}
    page.click(".cw-phases button:text-is('Demand')")
    assert items(page, "is-site") == {at["h"]}
    assert items(page, "is-lost") == {at[site] for site in wave.invalidated}
    page.click(".cw-phases button:text-is('Read')")
    assert items(page, "is-done") == {at[site] for site in wave.recomputed}
    assert items(page, "is-reused") == {at[site] for site in wave.reused}
    assert items(page, "is-lost") == items(page, "is-wanted") == set()
    expect(page.locator(".wave-step")).to_contain_text("y (-21 → -33)")
    page.click(".cw-phases button:text-is('Drop')")
    for state in ("is-site", "is-done", "is-lost", "is-wanted", "is-reused"):
        assert items(page, state) == set()
    expect(page.locator(".wave-step")).to_contain_text("0 nodes had to be computed to have it back")


def test_a_node_that_is_clicked_is_patched(graph_page: Path, open_page: Opener) -> None:
    page = open_page(graph_page).page
    place = {site: at for at, site in enumerate(recorded().nodes)}
    page.click(f".cw-item[data-item='{place['right']}']")
    expect(page.locator("#wave-site")).to_have_text("right")
    expect(page.locator("#wave-view")).to_have_attribute("data-phase", "patch")
    page.focus(f".cw-item[data-item='{place['x']}']")
    page.keyboard.press("Enter")
    expect(page.locator("#wave-site")).to_have_text("x")
    assert items(page, "can-patch") == {place[wave.site] for wave in recorded().waves}


def test_keys_and_the_slider_step(graph_page: Path, open_page: Opener) -> None:
    page = open_page(graph_page).page
    place = page.locator("#wave-place")
    page.focus("#wave-view .cw-stage")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(place).to_have_text(re.compile(r"^3 / "))
    page.keyboard.press("ArrowLeft")
    expect(place).to_have_text(re.compile(r"^2 / "))
    page.keyboard.press("End")
    expect(page.locator("#wave-view")).to_have_attribute("data-phase", "drop")
    expect(page.locator("#wave-next")).to_be_disabled()
    page.keyboard.press("Home")
    expect(page.locator("#wave-prev")).to_be_disabled()
    page.locator("#wave-slider").fill("4")
    expect(place).to_have_text(re.compile(r"^5 / "))
    page.focus("#wave-slider")  # it has arrow keys of its own: they must not step twice
    page.keyboard.press("ArrowRight")
    expect(place).to_have_text(re.compile(r"^6 / "))


def test_play_runs_to_the_end_and_can_be_paused(graph_page: Path, open_page: Opener) -> None:
    page = open_page(graph_page).page
    page.clock.install()
    page.click("#wave-play")
    page.clock.run_for(2_500)
    page.click("#wave-play")
    paused = page.locator("#wave-place").inner_text()
    assert not paused.startswith("1 /")
    page.clock.run_for(10_000)
    expect(page.locator("#wave-place")).to_have_text(paused)
    page.click("#wave-play")
    page.clock.run_for(60_000)
    expect(page.locator("#wave-view")).to_have_attribute("data-phase", "drop")
    expect(page.locator("#wave-play")).to_have_text("▶ Play")


def test_a_graph_that_nothing_is_patched_in_has_nothing_to_play(tmp_path: Path, open_page: Opener) -> None:
    wave_page(graph(), targets="y", out=tmp_path / "still.html")
    page = open_page(tmp_path / "still.html").page
    controls = page.locator("#wave-view button, #wave-slider")
    assert controls.count() > 5
    assert all(one.is_disabled() for one in controls.all())
    page.locator("#wave-view .cw-stage").press("ArrowRight")
    assert page.locator("#wave-view .is-lost[data-item]").count() == 0


def test_a_hostile_name_is_text(graph_page: Path, open_page: Opener) -> None:
    page = open_page(graph_page).page
    page.select_option("#wave-pick", label=EVIL)
    expect(page.locator("#wave-site")).to_have_text(EVIL)
    expect(page.locator(".wave-step")).to_contain_text(f"{EVIL} gets another value")
    expect(page.locator("h1")).to_have_text(f"A wave {EVIL}")
    assert page.locator("img").count() == 0


# -- a model folded by layer -----------------------------------------------------------------


def test_every_cell_shows_its_cone_by_its_name(model_page: Path, open_page: Opener) -> None:
    page = open_page(model_page).page
    for cell in cells():
        page.evaluate("name => window.conewise.showCone(name)", cell.name)
        cone = folded().cone(cell.name)
        expect(page.locator("[data-cone=name]")).to_have_text(cell.name)
        assert number(page, "[data-cone=recomputed]") == cone.node_evaluations
        assert number(page, "[data-cone=reused]") == sum(cone.reused)
        assert number(page, "[data-cone=kept]") == folded().full_evaluations - cone.node_evaluations
        view = "#cone-view"
        assert items(page, "is-done", view) == {at for at, count in enumerate(cone.recomputed) if count}
        assert items(page, "is-reused", view) == {at for at, count in enumerate(cone.reused) if count}
        assert items(page, "is-site", view) == set(cone.at)
        expect(page.locator("#wave-site")).to_have_text(cell.name)


def test_a_part_is_filled_as_far_as_it_is_recomputed(model_page: Path, open_page: Opener) -> None:
    page = open_page(model_page, reduced_motion="reduce").page
    page.evaluate("window.conewise.showCone('q[layer=1]')")
    cone = folded().cone("q[layer=1]")
    at = next(at for at, part in enumerate(folded().parts) if 0 < cone.recomputed[at] < part.nodes)
    item = page.locator(f"#cone-view .cw-item[data-item='{at}']")
    widths = [float(item.locator(kind).get_attribute("width") or 0) for kind in (".cw-done", ".cw-box")]
    assert widths[0] / widths[1] == pytest.approx(cone.recomputed[at] / folded().parts[at].nodes, rel=1e-3)
    expect(item.locator(".cw-count")).to_have_text(str(cone.recomputed[at]))


def test_the_cone_in_words_lists_every_part_of_it(model_page: Path, open_page: Opener) -> None:
    page = open_page(model_page).page
    page.evaluate("window.conewise.showCone('z[layer=1]')")
    page.click("#cone-view summary")
    cone = folded().cone("z[layer=1]")
    lines = page.locator("[data-cone=rows] tr").all_inner_texts()
    assert sum(int(line.split("\t")[1].split(" of ")[0]) for line in lines) == cone.node_evaluations
    assert [line for line in lines if "(the site)" in line] == [
        "layer 1, attention heads (the site)\t0 of 3\t1"
    ]


def test_a_site_that_the_page_does_not_know_is_said(model_page: Path, open_page: Opener) -> None:
    page = open_page(model_page).page
    page.evaluate("name => window.conewise.showCone(name)", EVIL)
    expect(page.locator("[data-cone=none]")).to_have_text(f"The cone of {EVIL} is not part of this page.")
    assert items(page, "is-done", "#cone-view") == set()
    page.evaluate("window.conewise.showCone('z[layer=0]')")
    expect(page.locator("[data-cone=none]")).to_be_hidden()


@pytest.mark.parametrize("name", ["z[layer=0]", "q[layer=1]", "z[layer=0] + mlp_out[layer=1]"])
def test_the_wave_of_a_model_ends_with_the_numbers_of_its_cone(
    model_page: Path, open_page: Opener, name: str
) -> None:
    page = open_page(model_page).page
    page.evaluate("name => window.conewise.showCone(name)", name)
    steps = list(stepped(page))
    cone = folded().cone(name)
    assert steps[-1][1] == counted(cone)
    rows = {folded().parts[at].row for at, count in enumerate(cone.recomputed) if count}
    assert sum(phase == "recompute" for phase, _ in steps) == len(rows)  # layer by layer


def test_a_part_that_is_clicked_goes_through_its_sites(model_page: Path, open_page: Opener) -> None:
    page = open_page(model_page).page
    (at,) = folded().cone("z[layer=0]").at
    seen = set()
    for _ in range(2):
        page.click(f"#wave-view .cw-item[data-item='{at}']")
        seen.add(page.locator("#wave-site").inner_text())
    assert seen == {"z[layer=0]", "z[layer=0] + mlp_out[layer=1]"}


# -- how it looks ----------------------------------------------------------------------------


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_nothing_is_wider_than_the_screen(
    model_page: Path, graph_page: Path, open_page: Opener, width: int
) -> None:
    for path in (model_page, graph_page):
        page = open_page(path, width=width).page
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_light_and_dark_are_different_and_legible(model_page: Path, open_page: Opener) -> None:
    script = """() => {
      const style = (one, name) => getComputedStyle(document.querySelector(one))[name];
      return [style("body", "backgroundColor"), style("#cone-view .is-full .cw-count", "fill"),
              style("#cone-view .is-full .cw-done", "fill"), style("#cone-view .cw-say", "color")];
    }"""
    seen = {}
    for scheme in ("light", "dark"):
        page = open_page(model_page, color_scheme=scheme).page
        seen[scheme] = [tuple(map(int, re.findall(r"\d+", colour)[:3])) for colour in page.evaluate(script)]
        ground, count, done, text = seen[scheme]
        assert contrast(ground, text) >= 7
        assert contrast(done, count) >= 4.5
        assert contrast(ground, done) >= 3
    assert all(light != dark for light, dark in zip(seen["light"], seen["dark"], strict=True))


def contrast(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """The contrast ratio of WCAG 2."""

    def luminance(colour: tuple[int, ...]) -> float:
        shares = [part / 255 for part in colour]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
