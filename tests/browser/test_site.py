"""The documentation as it is built: searched, opened from disk, with nothing fetched from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built anew; `CONEWISE_SITE` names one that is built already."""
    if built := os.environ.get("CONEWISE_SITE"):
        return Path(built).resolve()
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: `make docs` installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "true"})
    return folder


@pytest.fixture
def page(browser: Browser, site: Path) -> Iterator[Page]:
    """The first page, opened from disk. When the test is over, nothing was asked of any host."""
    context = browser.new_context()
    opened, requests = context.new_page(), list[str]()
    opened.on("request", lambda request: requests.append(request.url))
    opened.goto((site / "index.html").as_uri())
    yield opened
    context.close()
    assert requests
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:", "about:"))] == []


def _search(page: Page, words: str) -> None:
    page.click(".md-search__input:visible")
    page.locator(".md-search__input").press_sequentially(words)


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("causal_trace", "reference/"),
        ("graft_after", "reference/graphs.html"),
        ("FormatError", "formats.html"),
        ("resume a long run", "guides/long-runs.html"),
        ("sweep_ratio", "reference/theory.html"),
    ],
)
def test_a_search_finds_its_page(page: Page, words: str, where: str) -> None:
    _search(page, words)
    page.wait_for_selector(".md-search-result__link", timeout=30_000)
    found = page.eval_on_selector_all(".md-search-result__link", "links => links.map(link => link.href)")
    wanted = next((link for link in found[:8] if where in link), None)
    assert wanted is not None, found[:8]
    page.goto(wanted)
    assert page.inner_text("article h1")


def test_what_is_not_there_is_not_found(page: Page) -> None:
    _search(page, "xylophonist")
    page.wait_for_function(
        "() => document.querySelector('.md-search-result__meta').innerText.includes('No matching')",
        timeout=30_000,
    )
