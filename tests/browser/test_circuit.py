"""The page of a circuit as a reader has it: pointed at, chosen, its threshold moved, filtered, saved."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Opener
from tests.report.drawn_circuit import circuit_story, drawn_circuit, drawn_curve

pytestmark = pytest.mark.browser

CIRCUIT = drawn_circuit()
CURVE = drawn_curve(CIRCUIT)


@pytest.fixture(scope="module")
def circuit_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a small circuit, whose prompts and whose model's name are hostile."""
    folder = tmp_path_factory.mktemp("circuit")
    return CIRCUIT.report(folder / "circuit.html", curve=CURVE, story=circuit_story())


def drawn_edges(page: Page) -> set[str]:
    """The edges that can be seen, by the elements that the pointer finds."""
    numbers = page.locator(".hit:not(.away)").evaluate_all("all => all.map(one => one.dataset.edge)")
    names = page.evaluate(
        "JSON.parse(document.getElementById('conewise-circuit').text).edges.map(edge => edge.name)"
    )
    return {names[int(number)] for number in numbers}


def drawn_boxes(page: Page) -> set[str]:
    return {box.get_attribute("aria-label") or "" for box in page.locator(".box:visible").all()}


def test_the_circuit_itself_is_shown_first(circuit_report: Path, open_page: Opener) -> None:
    page = open_page(circuit_report).page
    assert drawn_edges(page) == set(CIRCUIT.edges)
    assert page.locator(".edge:visible").count() == len(CIRCUIT)
    assert set(CIRCUIT.nodes) <= drawn_boxes(page)
    expect(page.locator("#chosen")).to_have_text(f"{len(CIRCUIT)} edges · faithfulness 0.7")
    expect(page.locator("#own")).to_have_attribute("aria-pressed", "true")


@pytest.mark.parametrize("stop", [0, 4, len(CURVE.points) - 1])
def test_the_slider_shows_the_circuit_of_its_threshold(
    circuit_report: Path, open_page: Opener, stop: int
) -> None:
    page = open_page(circuit_report).page
    point = CURVE.points[stop]
    page.locator("#threshold").fill(str(stop))
    chosen = CIRCUIT.select(threshold=point.threshold)
    assert drawn_edges(page) == set(chosen.edges)
    assert set(chosen.nodes) <= drawn_boxes(page)
    said = page.locator("#chosen").inner_text()
    assert f"{point.edges} edge" in said
    assert point.faithfulness is not None
    assert float(said.rpartition(" ")[2]) == pytest.approx(point.faithfulness, rel=1e-3)
    expect(page.locator("#curve .dot.now")).to_have_attribute("data-stop", str(stop))
    count = "1 edge" if point.edges == 1 else f"{point.edges} edges"
    expect(page.locator("#page")).to_contain_text(f"{count} · page 1")
    page.locator("#own").click()
    assert drawn_edges(page) == set(CIRCUIT.edges)


def test_a_point_of_the_curve_is_a_threshold(circuit_report: Path, open_page: Opener) -> None:
    page = open_page(circuit_report).page
    page.locator("#curve .dot").nth(2).click()
    expect(page.locator("#threshold")).to_have_value("2")
    assert len(drawn_edges(page)) == CURVE.points[2].edges


def test_a_component_under_the_pointer_tells_what_it_reads_and_who_reads_it(
    circuit_report: Path, open_page: Opener
) -> None:
    page = open_page(circuit_report).page
    name = next(node for node in CIRCUIT.nodes if node.startswith("a2."))
    mark = page.locator(f".box[aria-label='{name}']")
    mark.scroll_into_view_if_needed()
    mark.hover()
    outward = sum(edge.startswith(f"{name}->") for edge in CIRCUIT.edges)
    inward = sum(edge.partition("->")[2].partition("<")[0] == name for edge in CIRCUIT.edges)
    tip = page.locator("#tip")
    expect(tip.locator("b")).to_have_text(name)
    texts = tip.locator("span").all_inner_texts()
    assert [int("".join(filter(str.isdigit, text))) for text in texts] == [inward, outward]
    assert page.locator(".edge.near:visible").count() == inward + outward
    page.mouse.move(5, 5)
    expect(tip).to_be_hidden()


def test_an_edge_of_the_table_is_chosen_and_stands_out(circuit_report: Path, open_page: Opener) -> None:
    page = open_page(circuit_report).page
    scores = CIRCUIT.scores
    assert scores is not None
    strongest = max(CIRCUIT.edges, key=lambda edge: abs(scores[edge]))
    row = page.locator("#edges tbody tr").first
    expect(row.locator("td.site")).to_have_text(strongest)
    row.click()
    expect(page.locator("#about-name")).to_have_text(strongest)
    expect(page.locator("#edges tr[aria-selected=true] td.site")).to_have_text(strongest)
    assert page.locator(".edge.near").count() == 1
    page.keyboard.press("Escape")
    expect(page.locator("#about-name")).to_have_text("The whole circuit")
    assert page.locator(".edge.near").count() == 0


def test_keys_choose_a_component(circuit_report: Path, open_page: Opener) -> None:
    page = open_page(circuit_report).page
    page.locator(".box[aria-label='logits']").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#about-name")).to_have_text("logits")
    inward = sorted(edge for edge in CIRCUIT.edges if edge.endswith("->logits"))
    listed = page.locator("#about-edges td:first-child").all_inner_texts()
    assert set(listed) <= set(inward)
    assert len(listed) == min(12, len(inward))


def test_the_table_is_filtered_and_saved(circuit_report: Path, open_page: Opener) -> None:
    page = open_page(circuit_report).page
    page.locator("#filter").fill("->logits")
    wanted = {edge for edge in CIRCUIT.edges if edge.endswith("->logits")}
    expect(page.locator("#page")).to_contain_text(f"{len(wanted)} edges")
    with page.expect_download() as saved:
        page.locator("#csv").click()
    lines = Path(saved.value.path()).read_text().splitlines()
    scores = CIRCUIT.scores
    assert scores is not None
    assert lines[0] == "edge,score"
    assert {line.rpartition(",")[0]: float(line.rpartition(",")[2]) for line in lines[1:]} == {
        edge: scores[edge] for edge in wanted
    }
    page.locator("#filter").fill("nowhere")
    expect(page.locator("#edges .empty")).to_have_text("No edge matches.")


def test_the_page_is_dark_where_the_reader_wants_it(circuit_report: Path, open_page: Opener) -> None:
    page = open_page(circuit_report, color_scheme="light").page
    colour = "getComputedStyle(document.querySelector('.edge.more')).stroke"
    light = page.evaluate(colour)
    page.locator("#theme").click()
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate(colour) != light


@pytest.mark.parametrize("width", [390, 800])
def test_a_narrow_page_does_not_scroll_sideways(circuit_report: Path, open_page: Opener, width: int) -> None:
    page = open_page(circuit_report, width=width).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert drawn_edges(page) == set(CIRCUIT.edges)
