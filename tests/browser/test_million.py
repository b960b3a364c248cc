"""A thousand by a thousand cells: the page opens, answers, and keeps every number."""

import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from playwright.sync_api import expect

from conewise.anatomy.places import Place
from conewise.anatomy.selectors import Cell, Spread
from conewise.report.page import write_page
from conewise.sweeps.result import Result
from tests.browser.conftest import Opener
from tests.report.swept import swept

pytestmark = pytest.mark.browser

SIDE = 1000


@pytest.fixture(scope="module")
def large() -> Result:
    """The small sweep's result, spread over a thousand layers of a thousand neurons."""
    cells = tuple(
        Cell(
            (Place("mlp_post", layer, "", MappingProxyType({"neuron": neuron})),),
            0,
            MappingProxyType({"layer": layer, "neuron": neuron}),
        )
        for layer in range(SIDE)
        for neuron in range(SIDE)
    )
    spread = Spread("mlp_post", ("layer", "neuron"), (tuple(range(SIDE)),) * 2, cells)
    table = torch.randn(1, SIDE * SIDE, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3
    result = swept()[0].select("logit_diff")
    return replace(
        result,
        spreads=(spread,),
        table=table,
        per_prompt=table[..., None],
        base_per_prompt=result.base[:, None],
        source_per_prompt=None if result.source is None else result.source[:, None],
    )


@pytest.fixture(scope="module")
def large_report(large: Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("large") / "large.html", large, swept()[1])


def test_a_million_cells_are_named_by_a_rule_and_not_one_by_one(large_report: Path) -> None:
    # 8 bytes for a value are 10.7 characters; Plotly and the page's own scripts are 5 MB.
    assert large_report.stat().st_size < 17e6


def test_a_million_cells_open_and_answer(large: Result, large_report: Path, open_page: Opener) -> None:
    page = open_page(large_report).page
    expect(page.locator("#page")).to_contain_text("1,000,000 of 1,000,000 sites")
    cells = large.cells
    effects = (large.table[0] - large.base[0]).numpy()
    ranked = np.argsort(-np.abs(effects), kind="stable")
    sites = page.locator("#ranked td.site")
    assert sites.all_inner_texts() == [cells[place].name for place in ranked[:25]]

    area = page.locator("#figures .plot .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    assert box is not None
    assert box["width"] >= SIDE, "a pixel for each column, or some would not be drawn"
    page.mouse.move(box["x"] + 200.5 / SIDE * box["width"], box["y"] + 300.5 / SIDE * box["height"])
    # A cell is about a pixel: the pointer is on this one, or on the next.
    expect(page.locator("#tip b")).to_have_text(
        re.compile(r"^mlp_post\[layer=(299|30[01]), neuron=(199|20[01])\]$")
    )
    under = page.locator("#tip b").inner_text()
    page.mouse.down()
    page.mouse.up()
    expect(page.locator("#site-name")).to_have_text(under)

    page.locator("#ranked th.value button").click()
    lowest = np.argsort(large.table[0].numpy(), kind="stable")
    assert sites.all_inner_texts() == [cells[place].name for place in lowest[:25]]

    page.locator("#filter").fill("layer=77, neuron=5")
    # layer=77 with neuron 5, 50–59, 500–599.
    expect(page.locator("#page")).to_contain_text("111 of 1,000,000 sites")
