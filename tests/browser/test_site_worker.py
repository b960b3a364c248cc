"""The site's search where there are no workers: pages that are opened from disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

SCRIPT = Path(__file__).parents[2] / "docs" / "iframe-worker.js"
PAGE = """<!doctype html><body><script src="iframe-worker.js"></script><script>
const heard = [], worker = new Worker("worker.js");
worker.onmessage = message => heard.push(["onmessage", message.data]);
worker.addEventListener("message", message => heard.push(["listener", message.data]));
worker.postMessage({ number: 20 });
</script></body>"""
WORKER = """
const loaded = importScripts("two.js", "one.js");
addEventListener("message", async message => {
  await loaded;
  postMessage({ found: message.data.number + one });
});
"""


def test_a_worker_of_a_page_from_disk_imports_and_answers(tmp_path: Path, browser: Browser) -> None:
    files = {
        "page.html": PAGE,
        "worker.js": WORKER,
        "two.js": "const two = 2;",
        "one.js": "const one = two - 1;",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / SCRIPT.name).write_bytes(SCRIPT.read_bytes())
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_function("heard.length === 2")
    assert page.evaluate("heard") == [["listener", {"found": 21}], ["onmessage", {"found": 21}]]
    page.evaluate("worker.terminate()")
    assert page.locator("iframe").count() == 0
    page.close()
