"""The report as a reader has it: opened from disk, pointed at, clicked, sorted, filtered, saved."""

import itertools
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import quote

import pandas as pd
import pytest
import torch
from playwright.sync_api import Locator, Page, expect

from conewise.anatomy.selectors import Cell
from conewise.report.page import write_page
from conewise.report.story import Story, TokenizedPair
from tests.browser.conftest import Opener
from tests.report.swept import HEADS, HOSTILE, LAYERS, LENGTH, swept

pytestmark = pytest.mark.browser


def cell_at(map_: Locator, row: int, column: int, rows: int, columns: int) -> tuple[float, float]:
    """Where the middle of a cell of a map is on the screen."""
    area = map_.locator(".nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    assert box is not None
    return (
        box["x"] + (column + 0.5) / columns * box["width"],
        box["y"] + (row + 0.5) / rows * box["height"],
    )


def maps(page: Page) -> Locator:
    return page.locator("#figures .plot")


def named(layer: int, head: int) -> Cell:
    return next(cell for cell in swept()[0].cells if dict(cell.at) == {"layer": layer, "head": head})


def shown_sites(page: Page) -> list[str]:
    return list(page.locator("#ranked td.site").all_inner_texts())


def frame() -> pd.DataFrame:
    return swept()[0].to_dataframe()


# -- maps -------------------------------------------------------------------------------------------


def test_every_part_of_the_sweep_has_a_figure(report: Path, open_page: Opener) -> None:
    page = open_page(report).page
    expect(maps(page)).to_have_count(3)
    expect(page.locator("#figures figcaption")).to_contain_text(["z", "mlp_out", "resid_pre"])
    assert page.locator("#figures .heatmaplayer image").count() == 2
    assert page.locator("#figures .barlayer .point").count() == LAYERS


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (1, 2), (3, 3)])
def test_a_cell_under_the_pointer_tells_its_name_and_numbers(
    report: Path, open_page: Opener, layer: int, head: int
) -> None:
    page = open_page(report).page
    page.mouse.move(*cell_at(maps(page).first, layer, head, LAYERS, HEADS))
    cell = named(layer, head)
    row = frame().query("site == @cell.name and metric == 'logit_diff'").iloc[0]
    wanted = [row["value"], row["effect"], row["normalised"] * 100]
    tip = page.locator("#tip")
    expect(tip).to_be_visible()
    expect(tip.locator("b")).to_have_text(cell.name)
    told = [
        text.removeprefix(name)
        for name, text in zip(NUMBERS, tip.locator("span").all_inner_texts(), strict=True)
    ]
    assert [number(text) for text in told] == pytest.approx(wanted, rel=1e-3, abs=0.006)


def test_a_clicked_cell_is_the_chosen_site_and_the_address_remembers_it(
    report: Path, open_page: Opener
) -> None:
    page = open_page(report).page
    page.mouse.click(*cell_at(maps(page).first, 2, 1, LAYERS, HEADS))
    name = named(2, 1).name
    expect(page.locator("#site-name")).to_have_text(name)
    expect(page.locator("#ranked tr[aria-selected=true] td.site")).to_have_text(name)
    assert page.url.partition("#")[2] == f"site={quote(name, safe='').replace('%20', '+')}"
    again = open_page(report, "#" + page.url.partition("#")[2]).page
    expect(again.locator("#site-name")).to_have_text(name)


def test_an_address_that_is_put_into_an_open_page_shows_all_that_it_says(
    report: Path, open_page: Opener
) -> None:
    page = open_page(report).page
    page.locator("#metric").select_option(index=1)
    page.get_by_text("Value", exact=True).click()
    page.locator("#tab-graph").click()
    other = page.url.partition("#")[2]
    name = named(2, 1).name
    page.evaluate("name => { location.hash = new URLSearchParams({ site: name }) }", name)
    expect(page.locator("#site-name")).to_have_text(name)
    expect(page.locator("#view-results")).to_be_visible()
    expect(page.locator("#metric")).to_have_value("0")
    expect(page.locator("[name=shown][value=effect]")).to_be_checked()
    page.evaluate("hash => { location.hash = hash }", other)
    expect(page.locator("#view-graph")).to_be_visible()
    expect(page.locator("#metric")).to_have_value("1")
    page.evaluate("location.hash = 'maps'")
    expect(page.locator("#view-graph")).to_be_visible()


def test_without_an_address_the_strongest_site_is_chosen(report: Path, open_page: Opener) -> None:
    page = open_page(report).page
    (strongest, effect, _), *_ = swept()[0].strongest()
    expect(page.locator("#site-name")).to_have_text(strongest.name)
    assert number(page.locator("#site-numbers dd").first.inner_text()) == pytest.approx(effect, rel=1e-3)
    assert page.url.partition("#")[2] == ""


NUMBERS = ("value", "effect", "of the way")


def number(text: str) -> float:
    """A number as the page writes it."""
    found = re.match(r"\s*[+−]?[\d.,]+(e[−\d]+)?", text)
    assert found is not None, text
    return float(found[0].replace("−", "-").replace(",", ""))


def test_the_keys_move_through_a_map_and_choose(report: Path, open_page: Opener) -> None:
    page = open_page(report).page
    maps(page).first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    # The first key shows the first cell.
    expect(page.locator("#tip b")).to_have_text(named(1, 0).name)
    page.keyboard.press("Enter")
    expect(page.locator("#site-name")).to_have_text(named(1, 0).name)
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()


@pytest.mark.parametrize("shown", ["effect", "share", "value"])
def test_what_is_drawn_is_what_was_chosen(report: Path, open_page: Opener, shown: str) -> None:
    page = open_page(report).page
    page.locator("#metric").select_option(label="prob")
    page.locator(f"[name=shown][value={shown}]").check(force=True)
    drawn = page.evaluate("document.querySelector('#figures .plot').data[0].z.map(row => Array.from(row))")
    result = swept()[0].select("prob")
    wanted = {"effect": result.effect, "share": result.normalised, "value": result.table[0]}[shown]
    rows = wanted[: LAYERS * HEADS].reshape(LAYERS, HEADS)
    assert drawn == rows.tolist()
    middle = float(result.base[0]) if shown == "value" else 0.0
    low, high = page.evaluate("(t => [t.zmin, t.zmax])(document.querySelector('#figures .plot').data[0])")
    assert (low + high) / 2 == pytest.approx(middle, abs=1e-12)


def test_bars_begin_at_the_middle_and_end_at_the_value(report: Path, open_page: Opener) -> None:
    page = open_page(report).page
    page.locator("[name=shown][value=value]").check(force=True)
    bars = page.evaluate("(t => [t.base, t.x])(document.querySelectorAll('#figures .plot')[1].data[0])")
    result = swept()[0]
    assert bars[0] == float(result.base[0])
    assert [bars[0] + x for x in bars[1]] == pytest.approx(result["mlp_out"].tolist())


# -- the table ----------------------------------------------------------------------------------------


def test_the_table_is_ranked_by_the_size_of_the_effect(report: Path, open_page: Opener) -> None:
    page = open_page(report).page
    wanted = [cell.name for cell, _, _ in swept()[0].strongest(top=25)]
    assert shown_sites(page) == wanted
    page.locator("#next").click()
    expect(page.locator("#page")).to_contain_text("page 2 of 2")
    assert len(shown_sites(page)) == len(swept()[0].cells) - 25


@pytest.mark.parametrize("column", ["value", "effect", "share", "layer", "head", "pos", "cost"])
def test_the_table_is_sorted_by_any_column_either_way(report: Path, open_page: Opener, column: str) -> None:
    page = open_page(report).page
    result, _, folded = swept()
    table = frame().query("metric == 'logit_diff'").reset_index(drop=True)
    table["cost"] = [folded.cone(site).node_evaluations for site in table["site"]]
    key = {"share": "normalised"}.get(column, column)
    head = page.locator(f"#ranked th.{column}")
    for _ in range(2):
        head.locator("button").click()
        is_up = head.get_attribute("aria-sort") == "ascending"
        wanted = table.sort_values(key, ascending=is_up, kind="stable", na_position="last")
        assert shown_sites(page) == wanted["site"].head(25).tolist()
    assert len(result.cells) == len(table)


def test_the_table_is_filtered_by_words_and_by_kind(report: Path, open_page: Opener) -> None:
    page = open_page(report).page
    page.locator("#filter").fill("LAYER=2  head")
    expect(page.locator("#page")).to_have_text(re.compile(rf"^{HEADS} of "))
    assert sorted(shown_sites(page)) == [named(2, head).name for head in range(HEADS)]
    page.locator("#filter").fill("no such site")
    expect(page.locator("#ranked tbody")).to_have_text("No site matches.")
    page.locator("#filter").fill("")
    page.locator("#kind").select_option("mlp_out")
    expect(page.locator("#page")).to_have_text(re.compile(rf"^{LAYERS} of "))
    assert all(site.startswith("mlp_out[") for site in shown_sites(page))


def test_a_row_is_chosen_by_a_click_and_by_the_keyboard(report: Path, open_page: Opener) -> None:
    page = open_page(report).page
    rows = page.locator("#ranked tbody tr")
    rows.nth(3).locator("td.effect").click()
    expect(page.locator("#site-name")).to_have_text(shown_sites(page)[3])
    rows.nth(5).locator("button").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#site-name")).to_have_text(shown_sites(page)[5])


def downloaded(page: Page, button: str, folder: Path) -> pd.DataFrame:
    with page.expect_download() as waiting:
        page.locator(button).click()
    path = folder / waiting.value.suggested_filename
    waiting.value.save_as(path)
    kinds = {"layer": "Int64", "head": "Int64", "pos": "Int64", "source": "float64", "normalised": "float64"}
    return pd.read_csv(path, dtype=kinds)


def test_the_csv_of_all_is_the_data_frame_of_the_result(
    report: Path, open_page: Opener, tmp_path: Path
) -> None:
    found = downloaded(open_page(report).page, "#csv-all", tmp_path)
    pd.testing.assert_frame_equal(found, frame(), check_exact=True)


def test_the_csv_of_these_has_the_rows_of_the_table_in_their_order(
    report: Path, open_page: Opener, tmp_path: Path
) -> None:
    page = open_page(report).page
    page.locator("#metric").select_option(label="prob")
    page.locator("#kind").select_option("z")
    page.locator("#ranked th.value button").click()
    found = downloaded(page, "#csv-shown", tmp_path)
    wanted = frame().query("metric == 'prob' and kind == 'z'").sort_values("value", kind="stable")
    pd.testing.assert_frame_equal(found, wanted.reset_index(drop=True), check_exact=True)


# -- the chosen site, and the second view -----------------------------------------------------------------


def test_a_chosen_site_shows_its_prompts_its_cost_and_its_cone(report: Path, open_page: Opener) -> None:
    page = open_page(report).page
    result, _, folded = swept()
    name = named(1, 2).name
    page.locator("#filter").fill(name)
    page.locator("#ranked td.site button", has_text=name).click()
    expect(page.locator("#site-name")).to_have_text(name)
    cone = folded.cone(name)
    expect(page.locator("#site-numbers")).to_contain_text(
        f"{cone.node_evaluations}of {folded.full_evaluations}"
    )
    drawn = page.evaluate("document.getElementById('site-prompts').data[0].y")
    place = [cell.name for cell in result.cells].index(name)
    assert result.base_per_prompt is not None
    assert drawn == (result.per_prompt[0, place] - result.base_per_prompt[0]).tolist()
    expect(page.locator("#cone-view")).to_be_visible()
    expect(page.locator("#cone-view [data-cone=name]")).to_have_text(name)
    done = page.locator("#cone-view .cw-stage .cw-item.is-done")
    assert done.count() == sum(count > 0 for count in cone.recomputed)
    assert page.locator("#cone-view .cw-stage .cw-item.is-site").count() == len(cone.at)


def test_the_wave_is_stepped_through_from_the_patch_to_the_read(report: Path, open_page: Opener) -> None:
    page = open_page(report, f"#site={quote(named(2, 0).name)}").page
    page.locator("#tab-graph").click()
    expect(page.locator("#view-results")).to_be_hidden()
    wave = page.locator("#wave-view")
    expect(page.locator("#wave-site")).to_have_text(named(2, 0).name)
    expect(wave).to_have_attribute("data-phase", "baseline")
    seen = ["baseline"]
    while page.locator("#wave-next").is_enabled():
        page.locator("#wave-next").click()
        phase = wave.get_attribute("data-phase")
        assert phase is not None
        seen += [phase] if phase != seen[-1] else []
        if phase == "read":
            cone = swept()[2].cone(named(2, 0).name)
            expect(page.locator("#wave-recomputed")).to_have_text(f"{cone.node_evaluations:,}")
    assert seen == ["baseline", "patch", "invalidate", "demand", "recompute", "read", "drop"]
    assert page.url.partition("#")[2].startswith("view=graph&site=")


def test_the_tabs_follow_the_keys(report: Path, open_page: Opener) -> None:
    page = open_page(report).page
    page.locator("#tab-results").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#view-graph")).to_be_visible()
    expect(page.locator("#tab-graph")).to_be_focused()
    expect(page.locator("#tab-graph")).to_have_attribute("aria-selected", "true")


# -- other people's text ------------------------------------------------------------------------------------


def test_a_hostile_prompt_stays_text(report: Path, open_page: Opener) -> None:
    opened = open_page(report)
    page = opened.page
    shown = page.locator("#question .tokens").first.inner_text()
    assert "</script><script>alert" in shown
    assert page.locator("#question b, #question img").count() == 1  # "Measured:" is the page's own
    scripts = page.locator("script").evaluate_all("all => all.map(one => one.type + one.id)")
    assert sorted(set(scripts)) == [
        "",
        "application/jsonconewise-data",
        "application/jsonconewise-folded",
        "application/jsonconewise-inside",
        "application/jsonconewise-speeds",
    ]
    assert opened.dialogs == []


def test_hostile_names_stay_text_wherever_they_are_shown(tmp_path: Path, open_page: Opener) -> None:
    result, story, _ = swept()
    evil = "<img src=x onerror=alert(1)><b>z</b>"
    part = result.spreads[1]
    cells = tuple(
        replace(cell, places=tuple(replace(place, name=evil) for place in cell.places)) for cell in part.cells
    )
    renamed = replace(part, name=evil, cells=cells)
    spreads = (result.spreads[0], renamed, result.spreads[2])
    page_path = write_page(
        tmp_path / "evil.html", replace(result, spreads=spreads, metrics=(evil, HOSTILE)), story
    )
    page = open_page(page_path).page
    page.locator("#kind").select_option(evil)
    page.locator("#ranked td.site button").first.click()
    assert evil in page.locator("#site-name").inner_text()
    maps(page).nth(1).focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#tip b")).to_contain_text(evil)
    assert page.locator("img[src=x]").count() == 0


def test_a_hostile_token_stays_text_on_an_axis(tmp_path: Path, open_page: Opener) -> None:
    """Plotly reads some HTML in labels, links among it."""
    result, _, _ = swept()
    tokens = ('<a href="https://x.y">t</a>', "<b>b</b>", "&lt;", "d", "e", "f")
    told = Story("m", (TokenizedPair("", "", tokens, tokens),))
    page = open_page(write_page(tmp_path / "evil.html", result, told)).page
    labels = maps(page).nth(2).locator(".xtick text").all_text_contents()
    assert labels == [f"{token} {place}" for place, token in enumerate(tokens)]
    assert page.locator("svg a").count() == 0


def test_a_script_that_gets_into_the_page_does_not_run(
    tmp_path: Path, report: Path, open_page: Opener
) -> None:
    """The policy is a second line: it stops what would have slipped through the escaping."""
    text = report.read_text(encoding="utf-8")
    bad = tmp_path / "bad.html"
    bad.write_text(text.replace("</main>", "<script>alert(1)</script></main>", 1), encoding="utf-8")
    opened = open_page(bad)
    assert opened.dialogs == []
    assert len(opened.messages) == 1
    assert "Content Security Policy" in opened.messages[0]
    opened.messages.clear()


def test_an_address_in_the_page_is_not_fetched(tmp_path: Path, report: Path, open_page: Opener) -> None:
    text = report.read_text(encoding="utf-8")
    bad = tmp_path / "bad.html"
    with listening() as (port, asked):
        tag = f'<img src="http://127.0.0.1:{port}/x.png">'
        bad.write_text(text.replace("</main>", f"{tag}</main>", 1), encoding="utf-8")
        opened = open_page(bad)
        open_policy = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", bad.read_text("utf-8"))
        assert asked == []
        assert "Content Security Policy" in opened.messages[0]
        # Without the policy the address is asked for: the listener does hear.
        bad.write_text(open_policy, encoding="utf-8")
        naked = open_page(bad)
        naked.page.wait_for_load_state("load")
        assert asked == ["/x.png"]
    for one in (opened, naked):
        one.messages.clear()
        one.requests[:] = [url for url in one.requests if not url.startswith("http:")]


@contextmanager
def listening() -> Iterator[tuple[int, list[str]]]:
    """A server of this machine, and the paths that were asked of it."""
    asked: list[str] = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name is http.server's
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, asked
        server.shutdown()


def test_numbers_that_are_not_finite_are_shown_and_ranked(tmp_path: Path, open_page: Opener) -> None:
    result, story, folded = swept()
    table = result.table.clone()
    table[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    path = write_page(tmp_path / "odd.html", replace(result, table=table), story, folded)
    page = open_page(path).page
    expect(page.locator("#maps-note")).to_contain_text("3 cells have a value that is no finite number")
    cells = result.cells
    assert shown_sites(page)[:2] == [cells[1].name, cells[2].name]
    page.locator("#last").click()
    assert shown_sites(page)[-1] == cells[0].name
    page.locator("#ranked tbody tr").last.click()
    expect(page.locator("#site-numbers")).to_contain_text("NaN")
    page.mouse.move(*cell_at(maps(page).first, 0, 1, LAYERS, HEADS))
    expect(page.locator("#tip")).to_contain_text("+∞")


# -- light and dark, wide and narrow, on paper ------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_system_and_its_switch(report: Path, open_page: Opener, scheme: str) -> None:
    page = open_page(report, color_scheme=scheme).page
    assert is_dark(page) == (scheme == "dark")
    for _ in range(2 if scheme == "light" else 1):
        page.locator("#theme").click()
    assert is_dark(page) != (scheme == "dark")
    drawn = page.evaluate("document.querySelector('#figures .plot').data[0].colorscale.map(one => one[1])")
    middle = [int(part) for part in re.findall(r"\d+", drawn[len(drawn) // 2])]
    assert (sum(middle) < 384) == is_dark(page), "no effect has the colour of the page"
    page.reload()
    page.wait_for_selector("html[data-ready=true]")
    assert is_dark(page) != (scheme == "dark"), "the choice is remembered"


def is_dark(page: Page) -> bool:
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) < 384


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(report: Path, open_page: Opener, scheme: str) -> None:
    """WCAG AA: 4.5 to 1 for every colour of text."""
    page = open_page(report, color_scheme=scheme).page
    style = "name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()"
    for ground in ("--page", "--card"):
        for ink in ("--ink", "--soft", "--link", "--good", "--bad"):
            assert contrast(page.evaluate(style, ground), page.evaluate(style, ink)) >= 4.5, (ground, ink)
    assert contrast(page.evaluate(style, "--mark"), page.evaluate(style, "--ink")) >= 4.5


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("view", ["", "#view=graph"])
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_no_width_makes_the_page_scroll_sideways(
    report: Path, open_page: Opener, width: int, view: str
) -> None:
    is_phone = width < 500
    page = open_page(report, view, width=width, is_mobile=is_phone, has_touch=is_phone).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_on_a_phone_a_tapped_row_leads_to_its_site(report: Path, open_page: Opener) -> None:
    page = open_page(report, width=390, is_mobile=True, has_touch=True).page
    page.locator("#ranked tbody tr").nth(2).tap()
    name = shown_sites(page)[2]
    expect(page.locator("#site-name")).to_have_text(name)
    expect(page.locator("#site-name")).to_be_in_viewport()


def test_on_paper_there_are_no_controls(report: Path, open_page: Opener) -> None:
    page = open_page(report).page
    page.emulate_media(media="print")
    expect(page.locator("#filter")).to_be_hidden()
    expect(page.locator("#ranked tbody tr").first).to_be_visible()
    expect(maps(page).first).to_be_visible()


def test_every_control_has_a_name_and_headings_are_in_order(report: Path, open_page: Opener) -> None:
    page = open_page(report).page
    unnamed = page.evaluate(
        """[...document.querySelectorAll("button, select, input, [role=application], [role=region]")].filter(
             one => !(one.textContent.trim() || one.getAttribute("aria-label") || one.title
                      || one.getAttribute("aria-labelledby") || one.labels?.length)
           ).map(one => one.outerHTML)"""
    )
    assert unnamed == []
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(one => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)")
    assert len(ids) == len(set(ids))


def test_the_command_is_copied(report: Path, open_page: Opener) -> None:
    page = open_page(report, permissions=["clipboard-read", "clipboard-write"]).page
    page.locator("#copy").click()
    expect(page.locator("#copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == swept()[1].command


def test_a_position_s_label_has_its_number(report: Path, open_page: Opener) -> None:
    page = open_page(report).page
    labels = maps(page).nth(2).locator(".xtick text").all_text_contents()
    assert [label.split()[-1] for label in labels] == [str(place) for place in range(LENGTH)]


def test_the_spread_and_the_inside_are_drawn_and_a_prompt_is_chosen(report: Path, open_page: Opener) -> None:
    opened = open_page(report)
    page = opened.page
    assert page.locator("#spread-figure .scatterlayer .trace").count() == 2
    assert page.locator("#inside-figures figure").count() == 6
    assert page.locator("#inside-figures .hm").count() == 6
    first, second = page.locator(".lens").nth(0), page.locator(".lens").nth(1)
    assert first.is_visible()
    assert not second.is_visible()
    page.select_option("#inside-prompt", index=1)
    assert second.is_visible()
    assert not first.is_visible()
    opened.check()
