"""Pages in Debian's Chromium, driven by Playwright; every request, message and dialog is kept.

`make test-browser` installs both. Without Playwright, nothing here is collected.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conewise.report.page import write_page
from tests.report.swept import swept
from tests.report.test_inside import inside

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

collect_ignore_glob = [] if importlib.util.find_spec("playwright") else ["test_*.py"]

CHROMIUM = os.environ.get("CONEWISE_CHROMIUM", "/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run"]


@dataclass
class Opened:
    """A page, and all that it asked for, said and raised since it was opened."""

    page: Page
    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def refuse(self, dialog: Dialog) -> None:
        """Close a dialog, and remember it."""
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def check(self) -> None:
        """Nothing was fetched but the file itself and what it made; nothing was complained of."""
        itself = self.page.url.partition("#")[0]
        others = {url.partition("#")[0] for url in self.requests if not url.startswith(("data:", "blob:"))}
        assert others == {itself}
        assert self.messages == []
        assert self.dialogs == []


Opener = Callable[..., Opened]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for all tests."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # not installed by `make setup`

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a small sweep, whose prompts are hostile."""
    return write_page(tmp_path_factory.mktemp("report") / "report.html", *swept(), inside())


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Opener]:
    """Open a page from disk; when the test is over, it must have asked for nothing and said nothing."""
    opened: list[tuple[Opened, Any]] = []

    def open_it(path: Path, fragment: str = "", *, width: int = 1280, **options: Any) -> Opened:
        options["viewport"] = {"width": width, "height": 900}
        context = browser.new_context(accept_downloads=True, **options)
        page = context.new_page()
        kept = Opened(page)
        page.on("request", lambda request: kept.requests.append(request.url))
        page.on("console", lambda message: kept.messages.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: kept.messages.append(str(error)))
        page.on("dialog", kept.refuse)
        opened.append((kept, context))
        page.goto(path.as_uri() + fragment)
        page.wait_for_selector("html[data-ready=true]", timeout=120_000)
        return kept

    yield open_it
    for kept, _ in opened:
        kept.check()
    for _, context in opened:
        context.close()
