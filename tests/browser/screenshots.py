"""The pictures of pages in the docs: `python -m tests.browser.screenshots REPORT.html FOLDER CIRCUIT.html`.

They are no part of the tests, so that tests leave the tree as it was.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.browser.conftest import CHROMIUM, FLAGS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LARGEST = 300_000


def main(report: Path, folder: Path, circuit: Path | None = None) -> None:
    """Write report-light, -dark, -phone, -cone and -wave.png, and report-circuit.png of a circuit's page."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # not installed by `make setup`

    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for scheme in ("light", "dark"):
            page = opened(browser, report, color_scheme=scheme)
            saved(page, folder / f"report-{scheme}.png")
        page = opened(browser, report, width=390, height=844, is_mobile=True, has_touch=True)
        page.locator("#maps").scroll_into_view_if_needed()
        page.evaluate("document.getElementById('maps').scrollIntoView()")
        saved(page, folder / "report-phone.png")
        page = opened(browser, report, height=1100)
        page.locator("#ranked tbody tr").nth(1).click()
        page.evaluate("document.getElementById('maps').scrollIntoView()")
        saved(page, folder / "report-cone.png")
        page = opened(browser, report, "#view=graph", height=1100)
        page.locator(".cw-phases button", has_text="Recompute").click()
        for _ in range(6):
            page.locator("#wave-next").click()
        saved(page, folder / "report-wave.png")
        if circuit is not None:
            page = opened(browser, circuit, height=760)
            page.evaluate("document.getElementById('picture').scrollIntoView()")
            page.locator(".box[aria-label='a1.h2']").hover()
            saved(page, folder / "report-circuit.png")
        browser.close()


def opened(
    browser: Browser,
    report: Path,
    fragment: str = "",
    *,
    width: int = 1280,
    height: int = 1400,
    **options: Any,
) -> Page:
    """The report in a window of that size, drawn."""
    page = browser.new_context(viewport={"width": width, "height": height}, **options).new_page()
    page.goto(report.resolve().as_uri() + fragment)
    page.wait_for_selector("html[data-ready=true]")
    return page


def saved(page: Page, path: Path) -> None:
    """A picture of what is seen, and not a large one."""
    page.wait_for_timeout(800)  # transitions
    page.screenshot(path=path)
    size = path.stat().st_size
    assert size <= LARGEST, f"{path} has {size} bytes; more than {LARGEST} is too much for the docs"
    print(path, size)  # noqa: T201  # a script


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
